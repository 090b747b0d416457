"""A run over the numpy program with real checkpoints, as a process that a test can kill: killable.py WORKDIR PAUSE."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from glm_jax.io.checkpoints import Checkpoints
from tests.host.doubles import FakePool, FakeProgram, make_loop, plan

SETTINGS = dict(tau=2, sft=2, value=2, rl=12, checkpoint_every=2, eval_every=4)
STEPS = 16


class Slow(FakeProgram):
    """Sleeps in each round, so that a kill finds the run in its midst."""

    pause = 0.0

    def round(self, state, inbox):
        time.sleep(self.pause)
        return super().round(state, inbox)


def main(workdir: Path, pause: float) -> None:
    program = Slow()
    Slow.pause = pause
    with Checkpoints(workdir / "checkpoints") as saver:
        newest, restored = saver.newest(), None
        if newest:
            step, host = newest
            start = program.init(0)
            restored = (*saver.restore(step, start.policy, start.critic), host)
        settings = plan(**SETTINGS)
        loop = make_loop(workdir, settings, program=program, pool=FakePool(delay=1), saver=saver, restored=restored)
        print("running", flush=True)
        loop.run()
        state = loop.device.state
    weights = [learner.params["w"].tobytes().hex() for learner in (state.policy, state.critic)]
    (workdir / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
