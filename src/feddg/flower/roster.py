"""Which node is which site: who may take a site's place, and who is there."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from flwr.proto.node_pb2 import NodeInfo

from feddg.flower.exchange import NOBODY, Recipient
from feddg.flower.identity import Identities
from feddg.flower.joining import held_out_among
from feddg.flower.parcels import MOST_CHARACTERS, Parcel
from feddg.flower.replies import MOST_CLASSES, MOST_DOMAINS, Introduction, read_introduction

log = logging.getLogger("feddg")


class Roster:
    """The sites of a deployment, and the nodes that have their places.

    Flower's node ids are random and change; a site's number is the position of its name, so
    sampling, order of aggregation and random streams are those of the in-process run.

    Args:
        sites: names of all sites that train, then of those that only evaluate.
        trainers: how many train.
        identities: whose name is whose.
        introduced: how many images sites joined this run with, in an earlier part of it.
        held_out: domains that nobody may train on.

    Attributes:
        sites: names of all sites.
        trainers: how many of them train.
        introductions: what connected sites said about themselves, by their numbers.
        counts: how many images sites introduced themselves with, by their numbers.
        objections: why nobody has a site's place, by its name, where somebody asked for it.
        on_introduction: called with each site's number and introduction, late joiners' too.
    """

    def __init__(
        self,
        sites: Sequence[str],
        trainers: int,
        identities: Identities,
        introduced: Mapping[str, int],
        held_out: Collection[str],
    ) -> None:
        self.sites, self.trainers = tuple(sites), trainers
        self._identities, self._held_out = identities, held_out
        self.counts = {id: introduced[n] for id, n in enumerate(sites) if n in introduced}
        self.introductions: dict[int, Introduction] = {}
        self.objections: dict[str, str] = {}
        self.on_introduction: Callable[[int, Introduction], None] = lambda id, introduction: None
        self._node_of: dict[int, int] = {}

    def recipient(self, id: int) -> Recipient:
        """Returns where to write to a site that has a node."""
        return Recipient(self._node_of[id], self.sites[id], id)

    def stranger(self, node: int, info: NodeInfo | None) -> Recipient:
        """Returns where to write to a node that has not said who it is, or says it again.

        Args:
            node: Flower's number of it.
            info: what Flower knows of it; None if it is gone.
        """
        id = next((id for id, own in self._node_of.items() if own == node), NOBODY)
        registered = f", registered as {info.name!r}" if info is not None and info.name else ""
        return Recipient(node, f"node {node}{registered}", id)

    def among(self, nodes: Collection[int]) -> set[int]:
        """Returns the numbers of the sites whose nodes are among ``nodes``."""
        return {id for id, node in self._node_of.items() if node in nodes}

    def admit(self, node: int, parcel: Parcel, info: NodeInfo | None) -> int | None:
        """Gives a node its site's place; returns the site's number, or None where it may not be.

        What is in its way is logged in one line.

        Args:
            node: Flower's number of it.
            parcel: its introduction, of which the fields were checked.
            info: what Flower knows of it; None if it is gone.
        """
        name = str(parcel.fields.get("site", ""))
        try:
            introduction = read_introduction(parcel)
        except ValueError as error:
            log.warning("left out: node %d calls itself %r, but %s", node, name, error)
            return None
        objection = self._identities.objection(name, info, self.sites)
        if objection is None:
            id = self.sites.index(name)
            objection = (
                self._held_out_fault(id, introduction)
                or self._changed(id, introduction)
                or self._other_files(id, introduction)
                or self._too_many_names(id, introduction)
            )
            if objection is None:
                self._settle(id, node, introduction)
                return id
            # Only now is it the site itself that cannot take part, and nobody in its name.
            self.objections[name] = objection
        log.warning("left out: node %d %s", node, objection)
        return None

    def _settle(self, id: int, node: int, introduction: Introduction) -> None:
        log.info("site %s is connected", self.sites[id])
        self._node_of[id] = node
        self.objections.pop(self.sites[id], None)
        self.introductions[id] = introduction
        self.counts.setdefault(id, introduction.images)
        self.on_introduction(id, introduction)

    def _held_out_fault(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site would train on domains that the run holds out, or None."""
        if id >= self.trainers:
            return None
        kept = held_out_among(introduction.domains, self._held_out)
        if not kept:
            return None
        name = self.sites[id]
        return (
            f"calls itself {name!r} and would train on {_listed(kept)}, which this run holds out; "
            f"give {name!r} images of other domains, name it in evaluation-sites, or take the "
            "domain out of hold_out"
        )

    def _changed(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site holds other images than it introduced itself with, or None."""
        before, earlier = self.counts.get(id), self.introductions.get(id)
        if (
            earlier is not None
            and introduction.images == before
            and (introduction.classes, introduction.domains) != (earlier.classes, earlier.domains)
        ):
            return (
                f"calls itself {self.sites[id]!r} and names other classes or domains than when it "
                "joined this run; a run's images stay the same: start a new run for others"
            )
        if before is None or before == introduction.images:
            return None
        return (
            f"calls itself {self.sites[id]!r} and has {introduction.images} images, but it joined "
            f"this run with {before}; a run's images stay the same: start a new run for others"
        )

    def _other_files(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site's method reads another file than another site's does, or None."""
        trainers = {k: v for k, v in self.introductions.items() if k < self.trainers and k != id}
        for other, known in trainers.items() if id < self.trainers else ():
            both = known.files.keys() & introduction.files.keys()
            unlike = sorted(f for f in both if known.files[f] != introduction.files[f])
            if unlike:
                return (
                    f"calls itself {self.sites[id]!r} and has another file as {unlike[0]} than "
                    f"{self.sites[other]!r}; all sites need the same one"
                )
        return None

    def _too_many_names(self, id: int, introduction: Introduction) -> str | None:
        """Says so where all sites' classes or domains would be too many with a site's, or None."""
        others = {k: v for k, v in self.introductions.items() if k < self.trainers and k != id}
        for what, most in (("classes", MOST_CLASSES), ("domains", MOST_DOMAINS)):
            own = getattr(introduction, what)
            all_ = set(own).union(*(getattr(other, what) for other in others.values()))
            # Every message to a site names all of them, in one text.
            size = len(json.dumps(list(all_)))
            if id < self.trainers and (len(all_) > most or size > MOST_CHARACTERS):
                largest = max(others, key=lambda k: len(getattr(others[k], what)))
                return (
                    f"calls itself {self.sites[id]!r} and names {len(own)} {what}: with those of "
                    f"the other sites, of which {self.sites[largest]!r} names most, "
                    f"{len(getattr(others[largest], what))}, they would be {len(all_)} in "
                    f"{size} characters, more than {most} or {MOST_CHARACTERS}"
                )
        return None

    def said_of(self, ids: Iterable[int], silent: Collection[str] = ()) -> str:
        """Returns the names of sites, each with what is in its way if that is known.

        Args:
            ids: their numbers.
            silent: names of nodes that are connected, but have not said who they are.
        """
        why = {name: "connected, but it has not introduced itself" for name in silent}
        why |= {name: f"it {objection}" for name, objection in self.objections.items()}
        names = [self.sites[id] for id in ids]
        return ", ".join(f"{name} ({why[name]})" if name in why else name for name in names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
