"""What a process is woken by while it waits for others."""

import select
from collections.abc import Collection, Mapping

from gpipe.comm.local import Link


class Poll:
    """Sleeps until there is news of any process, or something at the streams of those that are watched."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._poll = select.poll()
        self._watched = dict.fromkeys(links, 0)
        self._streams = {link.fileno() for link in links.values()}
        self._deaf: set[int] = set()
        for link in links.values():
            self._poll.register(link.news.connection, select.POLLIN)
            self._poll.register(link, 0)

    def watch(self, peer: int, *, reading: bool, writing: bool = False) -> None:
        """Watches the stream of a process for messages, or for that more can be written; or for neither."""
        events = self._links[peer].events(reading=reading, writing=writing)
        if self._watched[peer] != events:
            self._watched[peer] = events
            self._poll.modify(self._links[peer], events)

    def watch_only(self, peers: Collection[int]) -> None:
        """Watches no streams but of these, as far as they are watched."""
        for peer in [peer for peer, events in self._watched.items() if events and peer not in peers]:
            self.watch(peer, reading=False)

    def ignore(self, peer: int) -> None:
        """Is not woken by the news of a process any more."""
        if peer not in self._deaf:
            self._deaf.add(peer)
            self._poll.unregister(self._links[peer].news.connection)

    def sleep(self, seconds: float) -> "bool | None":
        """Sleeps until something happens; whether there is news, None if nothing happened in so many seconds."""
        happened = self._poll.poll(max(seconds, 0.0) * 1000)
        return not self._streams.issuperset(handle for handle, _ in happened) if happened else None
