"""How the syncer reaches learners whose connections end and come again."""

import threading

from ddiloco.workers.links import Links


class Link:
    """A link whose connection has ended; another thread may set a newer one in its place meanwhile."""

    def __init__(self, meanwhile=lambda: None):
        self._meanwhile = meanwhile

    @property
    def over(self):
        self._meanwhile()
        return True


def test_a_link_that_a_reconnected_learner_has_set_meanwhile_is_kept():
    links, new = Links(), object()
    setting = threading.Thread(target=links.set, args=(0, 7, new))

    def reconnected():
        setting.start()
        setting.join(0.2)  # it may be set only once the old one is forgotten

    links.set(0, 7, Link(reconnected))
    links.lost(0, 7)
    setting.join()
    assert links._links == {0: {7: new}}
