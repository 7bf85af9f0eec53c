"""Who a rank is: launchers' variables, layouts and their groups, seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from collie_parallel import topology
from collie_parallel.config import CollieConfig
from collie_parallel.topology import Env, env, setup_distribution
from tests.harness.nursery import REPO_ROOT
from tests.harness.pool import RankPool
from tests.harness.script import run_script
from tests.parallel import topology_cases as cases

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "64",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[03-05,9]",
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that no launcher has started; what the test and the code export is taken back."""
    for name in (*LAUNCHER, *SLURM, "SLURM_STEP_NODELIST", "SLURM_NODELIST"):
        monkeypatch.setenv(name, "")  # remembers the value, or that there was none
        monkeypatch.delenv(name)
    return monkeypatch


def place(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, local rank) under these variables."""
    assert not dist.is_initialized()
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return topology._rank_from_launcher()


def test_nothing_set_is_a_world_of_one(variables: pytest.MonkeyPatch) -> None:
    assert place(variables, {}) == (0, 1, 0)


def test_torchrun(variables: pytest.MonkeyPatch) -> None:
    assert place(variables, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (5, 8, 1)


def test_without_local_rank_it_is_the_rank(variables: pytest.MonkeyPatch) -> None:
    assert place(variables, {"RANK": "2", "WORLD_SIZE": "4"}) == (2, 4, 2)


def test_torchrun_within_slurm_has_the_word(variables: pytest.MonkeyPatch) -> None:
    assert place(variables, {**STEP, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}) == (3, 4, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not one of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
    ],
)
def test_variables_that_do_not_say_who_this_is(
    variables: pytest.MonkeyPatch, values: Mapping[str, str], message: str
) -> None:
    for name, value in values.items():
        variables.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        setup_distribution(CollieConfig())
    assert not dist.is_initialized()


def test_slurm_step(variables: pytest.MonkeyPatch) -> None:
    """The tasks of the step count, not those of the job; later readers find torchrun's variables."""
    assert place(variables, STEP) == (5, 8, 1)
    assert {name: os.environ[name] for name in LAUNCHER[:4]} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node03",
    }
    assert topology._rank_from_launcher() == (5, 8, 1)


def test_slurm_leaves_the_users_address_alone(variables: pytest.MonkeyPatch) -> None:
    assert place(variables, {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "WORLD_SIZE": "9"}) == (5, 8, 1)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "29400")


def test_slurm_ports_agree_in_a_step_and_differ_between_steps(variables: pytest.MonkeyPatch) -> None:
    ports = []
    for changes in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "1234568"}):
        for name in LAUNCHER:
            variables.delenv(name, raising=False)
        place(variables, {**STEP, **changes})
        ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] == ports[1] and len(set(ports)) == 3
    assert all(1024 < port < 32768 for port in ports)


@pytest.mark.parametrize(
    "shell",
    [
        # salloc's shell on the login node, and the script of sbatch: what the job has, and no step.
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n[1-2]"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # salloc with use_interactive_step: a step of one task within a job of eight.
        {
            "SLURM_NTASKS": "8",
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NODELIST": "n1",
        },
    ],
    ids=["salloc", "sbatch", "interactive step"],
)
def test_a_slurm_shell_is_a_world_of_one(variables: pytest.MonkeyPatch, shell: Mapping[str, str]) -> None:
    assert place(variables, shell) == (0, 1, 0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("n1,n2", "n1"),
        ("node[03-05,9],gpu1", "node03"),
        ("node[7]", "node7"),
        ("node[9,11-12]", "node9"),
        ("a-b-[001-128]", "a-b-001"),
        ("gpu1,node[1-4]", "gpu1"),
        ("rack[1-2]n[07-09]", "rack1n07"),
        ("node[1-2]-ib,other", "node1-ib"),
        ("node1.cluster.example", "node1.cluster.example"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert topology._first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",n1", "[", "[]"])
def test_a_node_list_without_a_host(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST=.* names no host; set MASTER_ADDR"):
        topology._first_host(nodes)


def test_no_address_of_rank_0(variables: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
        variables.setenv(name, value)
    variables.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="WORLD_SIZE=2 but MASTER_ADDR not set"):
        setup_distribution(CollieConfig(dp_size=2))
    assert not dist.is_initialized() and not env.is_initialized


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2, "dp_size": 1}])
def test_a_layout_that_does_not_fit_starts_nothing(variables: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="world size is 1, which is no multiple of"):
        setup_distribution(CollieConfig(**sizes))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        variables.setenv(name, value)
    with pytest.raises(ValueError, match="world size is 3, which is no multiple of"):
        setup_distribution(CollieConfig(**sizes))
    assert not dist.is_initialized() and not env.is_initialized


def test_more_ranks_than_devices_start_nothing(variables: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        variables.setenv(name, value)
    variables.setattr(torch.cuda, "is_available", lambda: True)
    variables.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK=2 but this host shows 2 CUDA device\(s\)"):
        setup_distribution(CollieConfig(dp_size=4))
    assert not dist.is_initialized() and not env.is_initialized


ALONE = {
    "rank": 0,
    "world_size": 1,
    "local_rank": 0,
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "dp_rank": 0,
    "dp_size": 1,
    "mp_rank": 0,
    "mp_size": 1,
    "is_pipeline": False,
    "is_first_stage": True,
    "is_last_stage": True,
}


def test_before_setup_env_is_a_world_of_one() -> None:
    assert not dist.is_initialized()
    fresh = Env()
    assert {name: getattr(fresh, name) for name in ALONE} == ALONE
    assert [fresh.tp_group, fresh.pp_group, fresh.dp_group, fresh.mp_group] == [None] * 4
    assert not fresh.is_initialized and fresh.seed == CollieConfig().seed
    fresh.barrier()
    assert topology.is_main_rank()
    topology.reset()  # nothing to take down


def test_a_world_of_one_after_setup() -> None:
    """In a process of its own, started by nobody."""
    code = f"""
import json
from collie_parallel.config import CollieConfig
from collie_parallel.topology import env, setup_distribution
setup_distribution(CollieConfig(seed=7))
setup_distribution(CollieConfig(seed=7))
env.barrier()
env.barrier(env.tp_group)
names = {list(ALONE)!r}
print(json.dumps({{**{{name: getattr(env, name) for name in names}}, "seed": env.seed, "device": env.device.type}}))
print([group.size() for group in (env.tp_group, env.pp_group, env.dp_group, env.mp_group)])
"""
    changes: dict[str, str | None] = {**dict.fromkeys((*LAUNCHER, *SLURM)), "CUDA_VISIBLE_DEVICES": ""}
    done = run_script(code, env=changes)
    assert done.rc == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert json.loads(first) == {**ALONE, "seed": 7, "device": "cpu"}
    assert second == "[1, 1, 1, 1]"
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_importing_the_topology_starts_nothing() -> None:
    code = """
import sys
import collie_parallel
assert "torch" not in sys.modules
import collie_parallel.topology
assert not {"deepspeed", "megatron", "transformers"} & set(sys.modules)
"""
    done = run_script(code, env={"PYTHONPATH": str(REPO_ROOT)})
    assert done.rc == 0, done.stderr


# Megatron's order: tensor ranks are neighbours, then data-parallel replicas, then stages.
EACH = [[0], [1], [2], [3]]
LAYOUTS = {
    (2, 1, 2): {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]], "pp": EACH, "mp": [[0, 1], [2, 3]]},
    (1, 1, 4): {
        "tp": EACH,
        "dp": [[0, 1, 2, 3]],
        "pp": EACH,
        "mp": EACH,
    },
    (4, 1, 1): {"tp": [[0, 1, 2, 3]], "dp": EACH, "pp": EACH, "mp": [[0, 1, 2, 3]]},
    (2, 2, 1): {"tp": [[0, 1], [2, 3]], "dp": EACH, "pp": [[0, 2], [1, 3]], "mp": [[0, 1, 2, 3]]},
    (1, 2, 2): {"tp": EACH, "dp": [[0, 1], [2, 3]], "pp": [[0, 2], [1, 3]], "mp": [[0, 2], [1, 3]]},
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_hold_the_right_ranks(pool4: RankPool, layout: tuple[int, int, int]) -> None:
    for rank, answer in enumerate(pool4.run(cases.describe, *layout)):
        assert answer["initialized"]
        assert (answer["rank"], answer["world_size"], answer["local_rank"]) == (rank, 4, rank)
        for kind, groups in LAYOUTS[layout].items():
            (mine,) = [group for group in groups if rank in group]
            assert answer[kind] == (mine.index(rank), len(mine), mine), kind
        stage, stages = answer["pp"][:2]
        assert answer["is_pipeline"] == (stages > 1)
        assert answer["is_first_stage"] == (stage == 0)
        assert answer["is_last_stage"] == (stage == stages - 1)


@pytest.mark.distributed
def test_a_second_setup(pool4: RankPool) -> None:
    for same, message in pool4.run(cases.setup_again):
        assert same
        assert "(tp, pp, dp) = (2, 1, 2); (4, 1, 1) was asked for" in message


@pytest.mark.distributed
def test_reset_makes_room_for_another_layout(pool4: RankPool) -> None:
    alone = (False, 1, 1, False)
    expected = [(True, 2, 2, True), alone, (True, 4, 1, True), alone, (True, 1, 4, True), alone]
    for seen in pool4.run(cases.reset_and_setup):
        assert seen == expected


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_seeds(pool4: RankPool, layout: tuple[int, int, int]) -> None:
    """Ranks that hold the same activations draw the same numbers; replicas and stages draw others."""
    results = pool4.run(cases.draws, *layout, seed=11)
    streams = [result["first"][0] for result in results]
    assert streams[0] == streams[1] != streams[2] == streams[3]
    for result in results:
        assert result["again"] == result["first"] != result["rest"]
        assert result["first"][1:] == results[0]["first"][1:]
    assert pool4.run(cases.draws, *layout, seed=11) == results
    assert pool4.run(cases.draws, *layout, seed=12)[0]["first"] != results[0]["first"]
