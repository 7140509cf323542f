"""Messages: every event and record comes out as it went in, and what cannot be is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.goodput.accounting import State
from ddiloco.protocol import events
from ddiloco.protocol.messages import Contribution, FragmentCounters, Report, RoundId, Watermark
from ddiloco.remote.syncer.downlink import Downlink, NewestFragments
from ddiloco.remote.syncer.record_receiver import RecordIntake
from ddiloco.remote.wire import wire_pb2 as pb
from ddiloco.remote.wire.event_messages import (
    MAX_POSITION_LENGTH,
    from_learner,
    from_syncer,
    learner_event,
    offer_of,
    syncer_event,
    up_header,
    update_of,
)
from ddiloco.remote.wire.record_messages import learner_record, record_message
from ddiloco.remote.wire.validation import LARGEST, WireError, parse
from ddiloco.telemetry import records
from ddiloco.workers.exchange import EventDelivery

NUMBER = st.integers(0, LARGEST)
VERSIONS = st.tuples(NUMBER, NUMBER, NUMBER)
COUNTERS = st.tuples(*[st.builds(FragmentCounters, NUMBER, NUMBER, NUMBER)] * 3)
REASON = st.text(max_size=40)
LEARNER_EVENTS = st.one_of(
    st.builds(events.LearnerJoined, st.just(3), NUMBER),
    st.builds(events.LearnerJoined, st.just(3), NUMBER, NUMBER, VERSIONS),
    st.builds(events.LearnerReady, st.just(3), NUMBER, NUMBER, VERSIONS),
    st.builds(events.LearnerLost, st.just(3), NUMBER, REASON),
    st.builds(events.StepReported, st.builds(Report, st.just(3), NUMBER, NUMBER, COUNTERS)),
    st.builds(events.OfferFailed, st.builds(RoundId, NUMBER, NUMBER), st.just(3), NUMBER, REASON),
)
WATERMARK = st.builds(Watermark, NUMBER, NUMBER)
CONTRIBUTIONS = st.builds(
    Contribution, st.just(3), NUMBER, st.integers(0, 9), *[NUMBER] * 5, WATERMARK, WATERMARK
)
NOTICES = st.one_of(
    st.builds(events.ClockSet, NUMBER),
    st.builds(events.OfferAsked, st.builds(RoundId, NUMBER, NUMBER), NUMBER, NUMBER),
    st.builds(events.NotMember, NUMBER),
    st.builds(events.Rejected, NUMBER, REASON),
    st.builds(events.TimingSet, *[NUMBER] * 3, *[st.floats(0, 1)] * 2, REASON),
)
TIME = st.floats(0, 1e10)
RECORDS = st.one_of(
    st.builds(
        records.StepDone,
        st.just(3),
        NUMBER,
        TIME,
        NUMBER,
        st.dictionaries(st.sampled_from(["loss", "skipped"]), st.floats(allow_nan=False)),
    ),
    st.builds(records.StateChanged, st.just(3), st.sampled_from(State), TIME),
    st.builds(
        records.Noted, st.just("drop"), st.fixed_dictionaries({"learner": st.just(3), "reason": REASON}), TIME
    ),
    st.builds(records.LearnerDied, st.just(3), TIME, st.text(max_size=40)),
)


@given(LEARNER_EVENTS)
def test_what_a_learner_tells_comes_out_as_it_went_in(event):
    message = parse(pb.FromLearner, from_learner(event).SerializeToString())
    assert learner_event(message, 3, 3) == event


def test_a_report_travels_as_what_has_changed_since_the_one_before():
    bases = tuple(FragmentCounters(version, -5, -50) for version in range(600))
    reports = [Report(3, 7, step, bases, True, (0,), step, 10 * step) for step in (8, 9)]
    reports.append(
        Report(3, 7, 10, (*bases[:2], FragmentCounters(9, -10, -100), *bases[3:]), True, (0,), 10, 100)
    )
    came, sizes, before = [None], [], None
    for report in reports:
        data = from_learner(events.StepReported(report), before).SerializeToString()
        came.append(learner_event(parse(pb.FromLearner, data), 3, 600, came[-1]).report)
        sizes.append(len(data))
        before = report
    assert came[1:] == reports
    assert max(sizes[1:]) < 60 < sizes[0]
    assert came[3].changed_since(came[2]) == [2]
    assert not came[2].changed_since(came[1])


@pytest.mark.parametrize("place", [3, 1 << 40])
def test_changes_of_what_a_report_does_not_have_are_refused(place):
    bases = (FragmentCounters(1, 2, 3),) * 3
    known = Report(3, 7, 8, bases)
    message = from_learner(
        events.StepReported(Report(3, 7, 9, (*bases[:2], FragmentCounters(2, 0, 0)))), known
    )
    sent = parse(pb.FromLearner, message.SerializeToString())
    with pytest.raises(WireError, match="malformed report"):
        learner_event(sent, 3, 3)  # nothing came before
    sent.event.step_reported.report.places[0] = place
    with pytest.raises(WireError, match="malformed report"):
        learner_event(sent, 3, 3, known)
    del sent.event.step_reported.report.versions[:]
    with pytest.raises(WireError, match="malformed report"):
        learner_event(sent, 3, 3, known)


@given(NOTICES)
def test_what_the_syncer_tells_comes_out_as_it_went_in(event):
    assert syncer_event(parse(pb.ToLearner, from_syncer(event).SerializeToString())) == event


@given(RECORDS)
def test_a_record_comes_out_as_it_went_in(record):
    message = parse(pb.Record, record_message(record).SerializeToString())
    assert learner_record(message, 3) == record


@given(NUMBER, CONTRIBUTIONS)
def test_an_offer_comes_out_as_it_went_in(step, contribution):
    round_id = RoundId(step, contribution.fragment)
    header = parse(pb.UpHeader, up_header(round_id, contribution, 77).SerializeToString())
    assert header.size == 77
    assert offer_of(header, 3, 10) == events.FragmentArrived(round_id, contribution)
    for other, fragments in ((contribution.fragment + 1, 11), (contribution.fragment, contribution.fragment)):
        header = up_header(RoundId(step, other), contribution, 77)
        with pytest.raises(WireError, match="another fragment"):
            offer_of(header, 3, fragments)


@given(st.builds(events.UpdateArrived, st.integers(0, 9), NUMBER, NUMBER, WATERMARK))
def test_an_update_comes_out_as_it_went_in_with_the_receivers_watermark(event):
    down = Downlink(NewestFragments(), learner=3)
    down.put(EventDelivery(event, [()], watermarks={event.fragment: {3: event.watermark}}))
    header = parse(pb.DownHeader, next(down.messages()))
    assert update_of(header, 10) == event


@pytest.mark.parametrize(
    "message",
    [
        pb.Record(),
        pb.Record(state_changed=pb.StateChanged(state="asleep")),
        pb.Record(step_done=pb.StepDone(step=1, time=math.nan)),
        pb.Record(step_done=pb.StepDone(step=1, tokens=1 << 60)),
        pb.Record(noted=pb.Noted(name="round", json="{}")),
        pb.Record(noted=pb.Noted(name="drop", json="[" * 8000)),
        pb.Record(noted=pb.Noted(name="drop", json="1")),
        pb.Record(transferred=pb.Transferred(learner=0, sent=1)),
    ],
    ids=["empty", "state", "time", "tokens", "a round", "deep", "no values", "a part's"],
)
def test_a_record_that_cannot_be_is_refused(message):
    with pytest.raises(WireError, match=r"^malformed record"):
        learner_record(message, 0)


@pytest.mark.parametrize("number", ["1" + "0" * 4000, "-1e999", "NaN", "true", "[]"])
def test_a_number_in_a_note_that_cannot_be_is_none(number):
    record = learner_record(pb.Record(noted=pb.Noted(name="recovered", json=f'{{"seconds": {number}}}')), 0)
    assert record.values["seconds"] is None


def steps_of(*numbers):
    return [record_message(records.StepDone(0, n, float(n), 10, {})) for n in numbers]


def steps_in(taken):
    return [r.step for r in taken if isinstance(r, records.StepDone)]


def lost_in(taken):
    return [r.values for r in taken if isinstance(r, records.Noted)]


def test_records_that_are_missing_are_counted_and_late_ones_are_not_taken():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 7)
    intake.take(0, 7, pb.Records(first=0, records=steps_of(1, 2)))
    intake.take(0, 7, pb.Records(first=5, records=steps_of(6, 7)))
    intake.take(0, 7, pb.Records(first=4, records=steps_of(5, 6)))  # of the connection before
    assert (steps_in(taken), lost_in(taken)) == ([1, 2, 6, 7], [{"learner": 0, "count": 3}])


def test_a_restarted_syncer_counts_nothing_that_the_one_before_may_have_had():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 7, began=False)
    intake.take(0, 7, pb.Records(first=90, records=steps_of(1)))
    intake.take(0, 7, pb.Records(first=93, records=steps_of(4)))
    assert lost_in(taken) == [{"learner": 0, "count": 2}]
    with pytest.raises(WireError, match="malformed record"):
        intake.take(0, 7, pb.Records(first=1 << 63, records=steps_of(5)))


def test_what_is_found_of_corruption_comes_out_as_it_went_in():
    alarm, note = records.corruption(3, 7, ["TPU_0", "TPU_1"], 5.0)
    assert learner_record(record_message(note), 3) == note
    assert learner_record(record_message(alarm), 3).sentence == f"learner 3: {alarm.sentence}"


def test_a_record_that_cannot_be_read_is_refused_once_and_holds_up_none():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 7)
    wrong = pb.Record(noted={"name": "no such note", "json": "{}", "time": 1.0})
    with pytest.raises(WireError):
        intake.take(0, 7, pb.Records(first=0, records=[*steps_of(1), wrong, *steps_of(2)]))
    intake.take(0, 7, pb.Records(first=3, records=steps_of(3)))
    assert (steps_in(taken), lost_in(taken)) == ([1, 3], [{"learner": 0, "count": 1}])


def states(taken):
    return [r.state for r in taken if isinstance(r, records.StateChanged)]


def test_a_learner_that_only_lost_its_connection_has_not_failed():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 7)
    intake.lost(0, 7)
    intake.joined(0, 7)
    intake.end()
    assert states(taken) == [State.STARTING]


def test_a_learner_in_whose_place_another_process_comes_has_failed_when_it_was_lost():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 7)
    intake.lost(0, 7)
    intake.joined(0, 8)
    assert states(taken) == [State.STARTING, State.FAILED, State.STARTING]
    with pytest.raises(WireError, match="records of another process"):
        intake.take(0, 7, pb.Records())


def test_a_process_whose_clock_was_set_back_takes_the_place_of_the_one_before():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 8)
    intake.joined(0, 7)
    assert states(taken) == [State.STARTING, State.FAILED, State.STARTING]
    intake.take(0, 7, pb.Records(records=steps_of(1)))
    intake.joined(0, 8)  # it lingers
    with pytest.raises(WireError, match="records of another process"):
        intake.take(0, 8, pb.Records(records=steps_of(1)))
    assert steps_in(taken) == [1]


def test_a_newer_process_has_its_place_back_once_one_that_lingered_is_gone():
    taken = []
    intake = RecordIntake(taken.append)
    intake.joined(0, 8)
    intake.take(0, 8, pb.Records(records=steps_of(1)))
    intake.joined(0, 7)
    intake.joined(0, 8)
    intake.lost(0, 7)
    intake.joined(0, 8)
    intake.take(0, 8, pb.Records(records=steps_of(1)))
    assert steps_in(taken) == [1], "what it told before counts once"


def test_a_position_longer_than_any_can_be_is_refused():
    for length, fits in ((MAX_POSITION_LENGTH, True), (MAX_POSITION_LENGTH + 1, False)):
        given = Contribution(3, 1, 0, 0, 4, 4, 40, upto=Watermark(1, 4, "x" * length))
        header = up_header(RoundId(4, 0), given, 77)
        if fits:
            assert offer_of(header, 3, 10).contribution.upto.position == "x" * length
        else:
            with pytest.raises(WireError, match="malformed position"):
                offer_of(header, 3, 10)
