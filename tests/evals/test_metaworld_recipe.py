"""The recipe from end to end at toy size, and that what it exports is a checkpoint like any other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from stretto.core.policy import RequestOptions
from stretto.deploy.policy import Policy, PolicyOptions, load_policy
from stretto.evals.env import FIRST_HELD_OUT_SEED
from stretto.evals.metaworld import BASE_CAMERA, INSTRUCTIONS, STATE, WRIST_CAMERA

RECIPE = Path(__file__).parents[2] / "recipes" / "metaworld"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recipe")
    command = [sys.executable, "-W", "error", str(RECIPE / "run.py"), "--out", str(out), "--toy", "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.fixture(scope="module")
def policy(toy: Path) -> Iterator[Policy]:
    loaded = load_policy(toy / "pi05-metaworld", PolicyOptions(device="cpu", dtype="float32", max_batch=2))
    loaded.warm()
    yield loaded
    loaded.close()


def load(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return importlib.import_module(name)


def observation() -> dict[str, np.ndarray | str]:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 80, 80, 3)).astype(np.uint8)
    state = np.array([0.0, 0.6, 0.2, 0.9], np.float32)
    return {BASE_CAMERA: pictures[0], WRIST_CAMERA: pictures[1], STATE: state, "prompt": "open the drawer"}


def test_the_exported_checkpoint_acts_as_the_trained_network_did(
    toy: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's processors, names and fp16 weights, served by the engine, against training's own code."""
    reference = load("reference").Reference(toy / "train")
    given = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: given[None])
    wanted = reference.infer(observation())["actions"]
    monkeypatch.undo()
    served = policy.infer(observation(), RequestOptions(noise_HD=given.numpy()))["actions"]
    assert served.shape == (16, 4)
    np.testing.assert_allclose(served, wanted, atol=5e-3)


def test_the_exported_policy_takes_the_environments_own_keys(policy: Policy) -> None:
    assert {BASE_CAMERA, WRIST_CAMERA, STATE} <= set(policy.metadata["observation"])  # type: ignore[call-overload]


def test_the_recipe_checks_its_policy_on_held_out_seeds(toy: Path) -> None:
    found = json.loads((toy / "check.json").read_text())
    assert found["episodes"] == 3
    assert not found["failures"]
    for round_ in (1, 2):
        losses = json.loads((toy / f"losses-{round_}.json").read_text())
        assert losses
        assert all(np.isfinite(row["loss"]) for row in losses)


def test_demonstrations_hold_what_the_expert_did_and_repeat_for_a_seed(tmp_path: Path) -> None:
    collect = load("collect")
    jobs = [
        collect.Job("drawer-open", "drawer-open", (11,), str(tmp_path / f"{i}.npz"), horizon=6, stride=4, image_size=24)
        for i in range(2)
    ]
    for job in jobs:
        _, kept, count = collect.run_job(job)
        assert kept == 1
    first, again = (np.load(job.out) for job in jobs)
    assert first["images"].shape == (count, 2, 24, 24, 3)
    assert first["chunks"].shape == (count, 6, 4)
    assert np.abs(first["chunks"]).max() <= 1.0
    assert all(np.array_equal(first[key], again[key]) for key in first.files)


def test_no_recorded_chunk_reaches_into_a_push() -> None:
    collect = load("collect")
    for seed in range(50):
        schedule = collect.pushes(np.random.default_rng(seed), 16)
        ends = [first + steps for first, steps, _ in schedule]
        assert all(nxt[0] - end >= 16 for end, nxt in zip(ends, schedule[1:], strict=False))


def test_held_out_seeds_cannot_be_collected() -> None:
    collect, run = load("collect"), load("run")
    options = run.defaults(collect.add_arguments, seed=FIRST_HELD_OUT_SEED - 10)
    with pytest.raises(SystemExit, match="held out"):
        collect.jobs_for(options)


def test_contrast_episodes_show_a_scene_under_the_opposite_instruction() -> None:
    collect, run = load("collect"), load("run")
    jobs = collect.jobs_for(run.defaults(collect.add_arguments, episodes=1, contrast=1))
    told = {(job.scene, job.told) for job in jobs}
    assert ("faucet-open", "faucet-close") in told
    assert {scene for scene, _ in told} == set(INSTRUCTIONS)
    seeds = [(job.scene, seed) for job in jobs for seed in job.seeds]
    assert len(seeds) == len(set(seeds))


def test_given_actions_carry_no_loss_and_the_rest_is_learned(toy: Path) -> None:
    """One batch, learned by heart: the loss falls, with some actions given and some not."""
    train, small = load("train"), load("small_pi05")
    tokenizer = small.build_tokenizer(toy / "again" / "tokenizer.json")
    raw = small.lerobot_config("toy", 40, 8, tokenizer.vocabulary, 4)
    net = small.build_net(train.Pi0Config.from_lerobot(raw), 0)
    torch.manual_seed(0)
    demos = train.Demos(
        torch.randint(0, 256, (2, 2, 40, 40, 3), dtype=torch.uint8),
        torch.tensor([[2, 5, 6, 7], [2, 8, 9, 0]]),
        torch.tensor([4, 3]),
        torch.tensor([0.8, -0.8])[:, None, None].expand(2, 8, 4).contiguous(),
    )
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    rows = torch.arange(2).repeat(8)
    losses = []
    for _ in range(60):
        loss = train.flow_loss(net, demos, rows, 2, 4, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])
    missing = [n for n, p in net.named_parameters() if p.grad is None]
    assert not missing, "every weight takes part"
