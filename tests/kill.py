"""Kills runs of the command line at random moments and compares what they end with.

    python tests/kill.py [--kills=N] [--seed=K] [--command=compress|study]

A run is killed (SIGKILL) and started again until it ends; another one is left alone.
Both must end with the same bytes; what stands under the name of a result before that
must have these bytes, too. Then the next run begins, until there were N kills.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

import numpy as np

# A kill comes a random time after a random number of files were written. There is a
# checkpoint after every execution of the training loop.
CHILD = """
import os, signal, sys, threading
import tensorflow as tf
from tfmiracle import cli
from tfmiracle.training import run

eager, writes, delay, *arguments = sys.argv[1:]
tf.config.run_functions_eagerly(eager == "True")
left, write = int(writes), run.write_atomically

def write_and_count(*args, **kwargs):
    global left
    write(*args, **kwargs)
    left -= 1
    if not left:
        kill = os.getpid(), signal.SIGKILL
        threading.Timer(float(delay), os.kill, kill).start()

run.write_atomically = write_and_count
run._CHECKPOINT_SECONDS = run._CHECKPOINT_SHARE = 0.0
sys.exit(cli.main(arguments))
"""
# Arguments of a run in a folder, whose data lie beside it, and the files it ends with.
COMMANDS = {
    "compress": (
        "compress --data={0}.npz --model=digits_cnn --block_size=64 --block_bits=8 "
        "--rules=dense1/kernel:hash=64,conv2/kernel:hash=8 --batch_size=32 "
        "--warmup_steps=10 --train_steps=20 --blocks_per_round=20 --finetune_steps=10 "
        "--keep_posterior --workdir={0}/work --output={0}/net.miracle --json",
        ["net.miracle", "net.posterior.npz"],
    ),
    "study": (
        "study --data={0}.npz --model=digits_cnn --block_sizes=64 --block_bits=8 "
        "--rules=dense1/kernel:hash=64,conv2/kernel:hash=8 --batch_size=32 --seeds=0 "
        "--warmup_steps=10 --train_steps=20 --blocks_per_round=20 --finetune_steps=10 "
        "--parameterizations=mean_var --workdir={0}/work",
        [f"work/runs/mean_var_b64_s0.{kind}" for kind in ("miracle", "posterior.npz")],
    ),
}


def start(
    command: str,
    folder: pathlib.Path,
    eager: bool,
    writes: int = 0,
    delay: float = 0.0,
):
    """Starts a run, which is killed some seconds after some files, if any.

    Not compiled (`eager`), such a short run takes less time.
    """
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 4, 4)).astype("float32"), np.arange(100) % 3
    np.savez(folder.with_suffix(".npz"), x_train=x, y_train=y, x_test=x, y_test=y)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(eager), str(writes), str(delay)]
            + COMMANDS[command][0].format(folder).split(),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )


def results(command: str, folder: pathlib.Path) -> dict[str, bytes]:
    """Content of the files that a run ends with, as far as there are any."""
    paths = {name: folder / name for name in COMMANDS[command][1]}
    return {name: p.read_bytes() for name, p in paths.items() if p.exists()}


def survive(
    command: str,
    expected: dict[str, bytes],
    folder: pathlib.Path,
    kills: int,
    rng: random.Random,
    eager: bool = False,
) -> int:
    """Kills a run up to `kills` times, lets it end, and compares.

    Returns:
      How many times it was killed; fewer if it ended before.
    """
    for kill in range(kills + 1):
        last = kill == kills
        writes, delay = rng.randint(1, 6), rng.uniform(0, 0.5)
        process = start(command, folder, eager, 0 if last else writes, delay)
        status = process.wait(timeout=1200)
        found = results(command, folder)
        for name, data in found.items():
            assert data == expected[name], f"{folder}/{name} is not as it should be"
        if status != -signal.SIGKILL:
            assert status == 0, (folder / "log").read_text()
            assert found.keys() == expected.keys(), sorted(found)
            return kill
    raise AssertionError(f"{folder} was killed by something else")


def unbroken(
    command: str, folder: pathlib.Path, eager: bool = False
) -> dict[str, bytes]:
    """What a run ends with that nothing stops."""
    status = start(command, folder, eager).wait(timeout=1200)
    assert status == 0, (folder / "log").read_text()
    return results(command, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=COMMANDS, default="compress")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        expected = unbroken(arguments.command, folder / "unbroken")
        kills, runs = 0, 0
        while kills < arguments.kills:
            runs += 1
            kills += survive(
                arguments.command,
                expected,
                folder / f"broken{runs}",
                arguments.kills - kills,
                rng,
            )
            print(f"{kills} kills, {runs} runs with the same bytes", flush=True)


if __name__ == "__main__":
    main()
