// Puts each news of the run in the place of what is shown, and keeps what the reader has opened and focused.
const content = document.getElementById("content");
const news = document.getElementById("news");

function keyOf(element) {
  return element.closest("article")?.id + element.querySelector("summary")?.textContent.replace(/\d+/, "");
}

function show(html) {
  const open = new Set([...content.querySelectorAll("details[open]")].map(keyOf));
  const focused = content.contains(document.activeElement) ? document.activeElement : null;
  const place = focused ? [...content.querySelectorAll(focused.tagName)].indexOf(focused) : -1;
  const template = document.createElement("template");
  template.innerHTML = html;
  for (const one of template.content.querySelectorAll("details")) one.open = open.has(keyOf(one));
  content.replaceChildren(template.content);
  if (focused) content.querySelectorAll(focused.tagName)[place]?.focus({ preventScroll: true });
}

const source = new EventSource("events");
source.onmessage = (message) => { news.textContent = ""; show(JSON.parse(message.data)); };
source.onerror = () => { news.textContent = "The run does not answer: this is its last known state."; };
