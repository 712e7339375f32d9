"""A sweep over several nodes, one of which is lost in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import infermix
import pytest
from infermix.errors import UserError
from infermix.record.record import Record

Write = Callable[..., Path]
LETTERS = "ABCDEFGH"


@pytest.fixture
def cluster() -> Iterator[Any]:
    utils = pytest.importorskip("ray.cluster_utils", reason="needs infermix[ray]")
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


def add_node(cluster: Any, **resources: float) -> Any:
    return cluster.add_node(object_store_memory=80 * 2**20, **{"num_cpus": 1, **resources})


class Sweep(threading.Thread):
    """`infermix.run` on the cluster while the test does something to it."""

    def __init__(self, path: Path, out: Path, plugin: str, address: str) -> None:
        super().__init__(daemon=True)
        self._call = lambda: infermix.run(path, out=out, ceilings=False, extra_plugins=[plugin], ray=address)
        self.records: list[Record] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.records = self._call()
        except BaseException as error:
            self.error = error


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


@pytest.mark.full
def test_nothing_is_lost_with_a_node(cluster: Any, experiment: Write, plugin: str, tmp_path: Path) -> None:
    nodes = [add_node(cluster) for _ in range(3)]
    cluster.wait_for_nodes()
    out = tmp_path / "out"
    path = experiment(engine={"use": "fake", "delay_s": 0.2}, sweep={"engine.letter": list(LETTERS)})
    sweep = Sweep(path, out, plugin, cluster.address)
    sweep.start()
    wait_for(lambda: len(list(out.glob("*.json"))) >= 2 or not sweep.is_alive())
    assert sweep.is_alive(), sweep.error
    cluster.remove_node(nodes[0], allow_graceful=False)
    sweep.join(300)
    assert sweep.error is None, sweep.error
    assert [record.state for record in sweep.records] == ["ok"] * len(LETTERS)
    assert {record.engine.options["letter"] for record in sweep.records if record.engine} == set(LETTERS)
    assert len(list(out.glob("fakes-*.json"))) == len(LETTERS), "a record is written once"
    kept = infermix.run(path, out=out, ceilings=False, extra_plugins=[plugin], ray=cluster.address)
    assert [record.run_id for record in kept] == [record.run_id for record in sweep.records], "nothing runs again"


@pytest.mark.full
def test_failures_of_cells_are_no_failures_of_nodes(
    cluster: Any, experiment: Write, plugin: str, tmp_path: Path
) -> None:
    add_node(cluster)
    cluster.wait_for_nodes()
    faults = ["none", "kill", "raise"]
    path = experiment(sweep={"engine.fault": faults}, engine={"use": "fake", "during": "repeat"})
    records = infermix.run(path, out=tmp_path / "out", ceilings=False, extra_plugins=[plugin], ray=cluster.address)
    assert [record.state for record in records] == ["ok", "error", "error"]


def test_cells_ask_for_what_they_use(experiment: Write, plugin: str) -> None:
    from infermix.spread import Needs, needs_of

    (plan,) = infermix.plan(experiment(limits={"num_threads": 3}), extra_plugins=[plugin])
    assert needs_of(plan) == Needs(3.0, 0.0)
    (plan,) = infermix.plan(experiment(device="cuda", limits={}), extra_plugins=[plugin])
    assert needs_of(plan) == Needs(1.0, 1.0)


def test_turns_need_one_machine(experiment: Write, plugin: str, tmp_path: Path) -> None:
    path = experiment(measure={"repeats": 2, "interleave": True})
    with pytest.raises(UserError, match="must share a machine"):
        infermix.run(path, out=tmp_path / "out", ceilings=False, extra_plugins=[plugin], ray="auto")


def test_no_cluster_is_told(experiment: Write, plugin: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs infermix[ray]")
    with pytest.raises(UserError, match="no Ray cluster"):
        infermix.run(experiment(), out=tmp_path / "o", ceilings=False, extra_plugins=[plugin], ray="127.0.0.1:1")
