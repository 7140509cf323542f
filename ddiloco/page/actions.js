// The dialog behind "Manage this run": says what would be done, asks once more, and sends it.
const dialog = document.getElementById("managing");
const form = dialog.querySelector("form");
const told = document.getElementById("managed");
const [cancel, send] = form.querySelectorAll("button");
const whom = document.getElementById("whom");
let sure = false;

function ofALearner() {
  return form.dataset.ofALearner.split(" ").includes(form.elements.verb.value);
}

function asked() {
  return form.elements.verb.value + (ofALearner() ? ` learner ${whom.value}` : "");
}

function again() {
  sure = false;
  send.textContent = "Go on";
  whom.disabled = !ofALearner();
  whom.required = ofALearner();
}

document.getElementById("manage").addEventListener("click", () => {
  form.reset();
  told.textContent = "";
  again();
  dialog.showModal();
});
cancel.addEventListener("click", () => dialog.close());
form.addEventListener("input", again);
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!sure) {
    sure = true;
    send.textContent = `Yes, ${asked()}`;
    told.textContent = `This run is asked to ${asked()}. Sure?`;
    return;
  }
  const token = form.dataset.secret ?? form.elements.token.value;
  const learner = ofALearner() ? Number(whom.value) : null;
  send.disabled = true;
  try {
    const body = JSON.stringify({ verb: form.elements.verb.value, learner, token });
    const headers = { "content-type": "application/json" };
    const answer = await fetch("act", { method: "POST", headers, body });
    told.textContent = (await answer.json()).line;
  } catch {
    told.textContent = "The run does not answer.";
  }
  send.disabled = false;
  again();
});
