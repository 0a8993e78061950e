"""Which proxy speaks to which rank: the same rules for every cluster of rank hosts.

Replicas are numbered in the order of the ranks that hold an engine; the one rank with a trainer is reference, actor and
update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiderl.cluster.proxies import ActorProxy, EngineProxy, Link, ReferenceProxy, UpdateProxy
from tiderl.cluster.specs import HostSpec
from tiderl.data.errors import ConfigurationError
from tiderl.runtime.ports import Actor, Engine, Reference


class Layout:
    """The proxies of a cluster. Raises `ConfigurationError` for ranks that cannot make up a run."""

    def __init__(self, specs: Sequence[HostSpec], links: Mapping[int, Link]) -> None:
        ranks = [spec.rank for spec in specs]
        if ranks != list(range(len(specs))):
            raise ConfigurationError(f"the ranks of a cluster are 0, 1, 2, …, not {ranks}", where="cluster.ranks")
        with_engine = [spec.rank for spec in specs if spec.engine is not None]
        with_trainer = [spec.rank for spec in specs if spec.trainer is not None]
        if not with_engine:
            raise ConfigurationError("no rank holds an engine", where="cluster.rollout_ranks")
        if len(with_trainer) != 1:
            raise ConfigurationError(
                f"training on {len(with_trainer)} ranks is not yet supported, only on one", where="cluster.ranks"
            )
        trainer = with_trainer[0]
        self.proxies = {rank: EngineProxy(replica, links[rank]) for replica, rank in enumerate(with_engine)}
        self.engines: dict[int, Engine] = {proxy.replica: proxy for proxy in self.proxies.values()}
        self.engine_ranks = {replica: (rank,) for replica, rank in enumerate(with_engine)}
        self.references: tuple[Reference, ...] = (ReferenceProxy(trainer, links[trainer]),)
        self.actors: tuple[Actor, ...] = (ActorProxy(trainer, links[trainer]),)
        self.update = UpdateProxy(links[trainer])
