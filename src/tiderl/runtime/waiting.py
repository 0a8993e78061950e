"""Members that may start and have no place yet: in their order, and by the replica where their group was opened."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from tiderl.runtime.buffer import Group, Member

Entry = tuple[Group, Member]
_Place = tuple[int, int]


class Waiting:
    """First come, first served; whoever has to start again goes first."""

    def __init__(self) -> None:
        self._all: OrderedDict[_Place, Entry] = OrderedDict()
        self._at: dict[int, OrderedDict[_Place, Entry]] = {}  # by replica, those of groups that were opened there

    def __len__(self) -> int:
        return len(self._all)

    def add(self, group: Group, members: Collection[Member]) -> None:
        for member in members:
            for queue in self._queues(group):
                queue[_place(group, member)] = (group, member)

    def add_first(self, group: Group, member: Member) -> None:
        self.add(group, [member])
        for queue in self._queues(group):
            queue.move_to_end(_place(group, member), last=False)

    def first(self, replica: int | None = None) -> Entry | None:
        """Of all; or of those whose group was opened on this replica."""
        queue = self._all if replica is None else self._at.get(replica)
        return next(iter(queue.values())) if queue else None

    def take(self, replica: int | None = None) -> Entry:
        """The `first`, which does not wait any more. There is one."""
        entry = self.first(replica)
        assert entry is not None
        self._remove(*entry)
        return entry

    def forget(self, group: Group) -> None:
        """The group is given up."""
        for entry in [entry for entry in self._all.values() if entry[0] is group]:
            self._remove(*entry)

    def _remove(self, group: Group, member: Member) -> None:
        for queue in self._queues(group):
            del queue[_place(group, member)]
        if group.opened_on is not None and not self._at[group.opened_on]:
            del self._at[group.opened_on]

    def _queues(self, group: Group) -> list[OrderedDict[_Place, Entry]]:
        if group.opened_on is None:
            return [self._all]
        return [self._all, self._at.setdefault(group.opened_on, OrderedDict())]


def _place(group: Group, member: Member) -> _Place:
    return group.prompt_id, member.number
