"""What a critic explains: against closed forms, and over a whole run."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest

from glm_jax.bench.critic import Tokens, compare, position_baseline, tokens_of
from glm_jax.bench.critic import run as judge
from glm_jax.cli.bench import run as bench
from glm_jax.cli.flags import UsageError
from glm_jax.host.batches import example_document, pack, unpack
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.rollouts import TRAIN, Rollout
from glm_jax.host.stages import ScheduleConfig, StageConfig
from glm_jax.learn.advantage import explained_variance
from tests.host.test_run import CONFIG, call


def tokens(rollout, position, prompt, returns):
    return Tokens(*map(np.asarray, (rollout, position, prompt)), np.asarray(returns, np.float64))


def random_rollouts(count=200, seed=0):
    """Rollout numbers and returns (one per rollout) of rollouts of 1 to 6 tokens."""
    rng = np.random.default_rng(seed)
    number = np.repeat(np.arange(count), rng.integers(1, 7, count))
    return number, rng.choice([0.0, 0.25, 1.0], count)[number], rng


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing():
    number, returns, _ = random_rollouts()
    perfect, constant, difference = compare(number, returns, returns, np.full_like(returns, 0.7))
    assert (perfect.value, perfect.low, perfect.high) == pytest.approx((1, 1, 1))
    assert (constant.value, constant.low, constant.high) == pytest.approx((0, 0, 0))
    assert difference.value == pytest.approx(1)


def test_the_figure_over_all_tokens_is_that_of_the_training_step():
    number, returns, rng = random_rollouts()
    critic, other = returns + rng.normal(0, 0.3, len(returns)), rng.normal(0, 1, len(returns))
    a, b, c = compare(number, returns, critic, other)
    every = np.ones(len(returns), bool)
    assert a.value == pytest.approx(1 - np.var(returns - critic) / np.var(returns))
    assert a.value == pytest.approx(float(explained_variance(returns, critic, every)), abs=1e-5)
    assert b.value < 0 and c.value == pytest.approx(a.value - b.value)
    assert a.low < a.value < a.high and c.low < c.value < c.high


def test_intervals_come_from_whole_rollouts():
    """Tokens said twice add no knowledge, rollouts do: the interval stays in one case and shrinks in the other."""
    number, returns, rng = random_rollouts(60)
    critic = returns + rng.normal(0, 0.3, 60)[number]
    zero = np.zeros_like(returns)
    width = lambda *x: np.ptp([(e := compare(*x)[0]).low, e.high])
    once = width(number, returns, critic, zero)
    twice = [np.concatenate([x, x]) for x in (returns, critic, zero)]
    assert width(np.concatenate([number, number]), *twice) == pytest.approx(once)
    assert width(np.concatenate([number, number + 60]), *twice) < 0.85 * once


def test_returns_that_do_not_vary_have_nothing_to_explain():
    number = np.asarray([0, 0, 1])
    assert compare(number, np.full(3, 0.3), np.zeros(3), np.zeros(3)) == (None, None, None)


def test_the_baseline_is_the_mean_of_its_cell_then_of_the_position_then_of_all():
    fitted = tokens([0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [3, 3, 3, 3, 5], [1.0, 1.0, 0.5, 0.0, 0.0])
    judged = tokens([0, 0, 1, 2, 3], [0, 1, 0, 0, 7], [3, 3, 5, 9, 3], [0.0] * 5)
    value, unseen = position_baseline(fitted, judged)
    np.testing.assert_allclose(value, [0.75, 0.5, 0.0, 0.5, 0.5])
    assert unseen.tolist() == [False, False, False, True, True]


def test_the_baseline_is_the_least_squares_fit_of_its_cells():
    """On the tokens that it was fitted on it explains what the cells' means do: 1 - within / total variance."""
    rng = np.random.default_rng(1)
    position, prompt = rng.integers(0, 4, 500), rng.integers(2, 5, 500)
    returns = 0.2 * position - 0.1 * prompt + rng.normal(0, 0.3, 500)
    both = tokens(np.arange(500), position, prompt, returns)
    value, unseen = position_baseline(both, both)
    cells = np.eye(12)[(prompt - 2) * 4 + position]
    np.testing.assert_allclose(value, cells @ np.linalg.lstsq(cells, returns, rcond=None)[0])
    assert not unseen.any()


def test_returns_are_rewards_discounted_from_the_last_token():
    def rollout(id, prompt, length, reward):
        sampled = dict(tokens=array("i", [2] * length), sampled=array("b", [1] * length))
        return Rollout(id, "t", 0, "f", TRAIN, array("i", [1] * prompt), **sampled, reward=reward)

    found = tokens_of([rollout(7, 2, 3, 1.0), rollout(9, 4, 1, 0.5)], gamma=0.5)
    assert found.rollout.tolist() == [0, 0, 0, 1] and found.position.tolist() == [0, 1, 2, 0]
    assert found.prompt.tolist() == [2, 2, 2, 4] and found.returns.tolist() == [0.25, 0.5, 1.0, 0.5]


def test_what_stands_at_a_packed_rollout_s_tokens_is_read_back_from_its_place():
    """Four documents of 3 to 5 tokens in rows of 8: two rows hold them all, one row holds two."""
    sizes = {3: 5, 8: 4, 5: 3, 6: 4}
    answer = lambda key, n: (range(10 * key, 10 * key + n - 2), [True] * (n - 2))
    documents = [example_document(key, [key] * 2, *answer(key, n)) for key, n in sizes.items()]
    batch, waiting = pack(documents, (2, 1, 8))
    assert not waiting and int(batch.used) == 2
    found = unpack(batch.tokens, documents)
    assert {key: x.tolist() for key, x in found.items()} == {
        key: list(range(10 * key, 10 * key + n - 2)) for key, n in sizes.items()
    }
    batch, waiting = pack(documents, (1, 1, 8))
    assert {*unpack(batch.tokens, documents)} == {3, 5} and [document.key for document in waiting] == [8, 6]


def test_a_checkpoint_from_before_the_critic_was_made_is_refused(monkeypatch, tmp_path):
    rate = ScheduleConfig(peak=1e-3)
    stages = dict(sft=StageConfig(steps=3, policy_lr=rate), value=StageConfig(steps=2, critic_lr=rate))
    monkeypatch.setattr("glm_jax.bench.critic.newest_step", lambda config, workdir: 3)
    with pytest.raises(RunError, match="of step 3, and the critic is made from the policy after step 3"):
        judge(RunConfig(**stages), tmp_path, 8, None)


def test_each_bench_wants_its_own_flags(capsys):
    with pytest.raises(UsageError, match="--config and --workdir missing"):
        bench(["critic"])
    with pytest.raises(UsageError, match="repeats"):
        bench(["critic", "--repeats=2"])
    with pytest.raises(UsageError, match="'ctitic' is no bench. Known: .*rl: .*; critic: "):
        bench(["ctitic", "--config=x"])
    with pytest.raises(UsageError, match="which bench"):
        bench([])
    with pytest.raises(SystemExit):
        bench(["--help", "rl"])
    assert "--peer_python" in capsys.readouterr().out
    assert bench(["--help"]) == 0 and "critic " in capsys.readouterr().out


FAMILIES = """    config.tasks.families += (dict(name="chain_sum", template="{metadata[expression]}=",
                                   settings=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)),)
    return config
"""
NO_RL = "--config.rl.steps=0"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    (folder / "config.py").write_text(CONFIG.replace("    return config\n", FAMILIES))
    done = call(folder, "train", "--workdir", str(folder / "run"), NO_RL)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.rollout
def test_the_critic_of_a_run_is_judged_beside_the_baseline_per_family(place):
    report = place / "found.json"
    found = call(place, "bench", "critic", "--workdir", str(place / "run"), NO_RL, "--rollouts=24", f"--json={report}")
    assert found.returncode == 0, found.stderr
    assert f"{place / 'run'} at step 5" in found.stdout and "fitted on 24 training rollouts" in found.stdout
    figures = json.loads(report.read_text())
    whole, *parts = figures["rows"]
    assert [row["family"] for row in parts] == ["chain_sum", "spell_backward"]
    assert whole["rollouts"] == 8 == sum(row["rollouts"] for row in parts)
    assert whole["tokens"] == sum(row["tokens"] for row in parts) >= 8
    assert all(f"| {row['family']} | {row['rollouts']} | {row['tokens']} |" in found.stdout for row in (whole, *parts))
    if whole["critic"] is not None:
        difference = whole["critic"]["value"] - whole["baseline"]["value"]
        assert whole["difference"]["value"] == pytest.approx(difference)


@pytest.mark.rollout
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=nowhere", NO_RL], "nowhere holds no checkpoint"),
        (["--workdir=nowhere", "--config.learn.advantage=running_mean", "--config.value.steps=0"], "has no critic"),
    ],
)
def test_a_workdir_without_a_critic_is_told(place, flags, message):
    found = call(place, "bench", "critic", *flags)
    assert found.returncode == 1 and message in found.stderr and "Traceback" not in found.stderr
