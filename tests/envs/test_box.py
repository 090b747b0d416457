"""Boxes: what a command in one can do, what it cannot, and what is left of it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from glm_jax.envs.sandbox import bubblewrap, cgroup, probe, seccomp
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.sandbox.errors import BoxDied, BoxError, SandboxUnavailable
from glm_jax.envs.sandbox.files import File
from glm_jax.envs.sandbox.limits import Limits
from tests.envs.weak import write

pytestmark = pytest.mark.envs
ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(memory_mb=160, disk_mb=8, processes=40)
PATIENT = 60.0  # seconds: no test waits for it, a machine under load may need it


@pytest.fixture(scope="module")
def box():
    with Box(SMALL) as shared:
        yield shared


def text(box: Box, command: str) -> str:
    result = box.run(command, PATIENT)
    assert result.code == 0, result
    return str(result.out)


def sleepers(box: Box) -> int:
    """Processes of the box that sleep on, zombies apart."""
    listed = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done"
    return text(box, listed).count("sleep 1000 \n")


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_every_property_of_the_probe_holds():
    report = probe.require()
    assert len(report.properties) == 13 and all(p.holds for p in report.properties)
    assert report.root == (os.geteuid() == 0)


def network_left(monkeypatch):
    real = bubblewrap.namespaces
    monkeypatch.setattr(bubblewrap, "namespaces", lambda *how: [word for word in real(*how) if word != "--unshare-net"])


def calls_unfiltered(monkeypatch):
    allow_all = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    monkeypatch.setattr(seccomp, "program", lambda nesting, watched: allow_all)


def host_folder_shown(monkeypatch):
    real = bubblewrap.python
    monkeypatch.setattr(bubblewrap, "python", lambda: ["--bind", "/dev/shm", "/dev/shm", *real()])


def disk_uncapped(monkeypatch):
    real = bubblewrap.writable
    monkeypatch.setattr(bubblewrap, "writable", lambda folders, disk_mb: real(folders, 1000))


def memory_uncapped(monkeypatch):
    monkeypatch.setattr(probe, "_LIMITS", Limits(memory_mb=4096, disk_mb=8, processes=24))


@pytest.mark.parametrize(
    ("broken", "property"),
    [
        (network_left, "network cut"),
        (calls_unfiltered, "system calls filtered"),
        (host_folder_shown, "host files hidden"),
        (disk_uncapped, "disk capped"),
        (memory_uncapped, "memory capped"),
    ],
)
def test_the_probe_finds_the_property_that_fails_and_refuses_the_machine(monkeypatch, broken, property: str):
    broken(monkeypatch)
    probe.require.cache_clear()
    with pytest.raises(SandboxUnavailable, match=f"do not isolate here: .*{property}: "):
        probe.require()


def test_an_ordinary_user_has_boxes_with_the_same_properties_and_grades_in_them():
    """The tests may run as root: then this one gives up root for a copy of the code that anybody may read."""
    folder = Path(tempfile.mkdtemp(prefix="glm-jax-test-"))
    try:
        shutil.copytree(ROOT / "glm_jax" / "envs", folder / "glm_jax" / "envs")
        shutil.copy(ROOT / "glm_jax" / "text.py", folder / "glm_jax")
        write(folder / "task")
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        (folder / "home").mkdir()
        (folder / "home").chmod(0o777)
        ordinary = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"] if os.geteuid() == 0 else []
        code = f"""
            from pathlib import Path
            from glm_jax.envs.sandbox.probe import require
            from glm_jax.envs.tasks.harbor import read_task
            from glm_jax.envs.verify.attempt import scripted
            from glm_jax.envs.verify.grade import grade
            report, task = require(), read_task(Path({str(folder / "task")!r}))
            rewards = [grade(task, scripted(task, tree)[0]).reward for tree in (task.solution, *task.partials.values())]
            print(report.root, report.memory_by, len(report.properties), *rewards)
        """
        env = {"PYTHONPATH": str(folder), "HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
        said = []
        for python in (sys.executable, "/usr/bin/python3"):  # a Python below /root is nobody else's
            done = subprocess.run(
                [*ordinary, python, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=120
            )
            if done.returncode == 0:
                assert done.stdout.split() == ["False", "watchdog", "13", "1.0", "0.0", "0.0"]
                return
            said.append(f"{python}: {done.stderr[-1500:]}")
        pytest.fail("\n".join(said))
    finally:
        shutil.rmtree(folder)


def test_a_command_sees_its_input_environment_and_folder(box):
    result = box.run("cat; echo $COLOUR >&2; pwd >&2", PATIENT, stdin=b"x" * 300_000, env={"COLOUR": "red"})
    assert result.ok and result.out.total == 300_000 and str(result.err) == "red\n/app\n"
    assert box.run(["/bin/sh", "-c", "exit 7"], PATIENT).code == 7
    assert box.run("kill -TERM $$", PATIENT).code == 128 + signal.SIGTERM
    missing = box.run(["no-such-program"], PATIENT)
    assert missing.code == 127 and str(missing.err) == "no-such-program: No such file or directory\n"
    assert box.run("true", PATIENT, cwd="/nowhere").code == 127


def test_long_output_keeps_head_and_tail_and_says_what_is_left_out(box):
    result = box.run("seq 1 100000", PATIENT, output_bytes=1000)
    total = sum(len(str(i)) + 1 for i in range(1, 100001))
    assert result.out.total == total and len(result.out.head) == len(result.out.tail) == 500
    assert str(result.out).startswith("1\n2\n3\n") and str(result.out).endswith("99999\n100000\n")
    assert f"[... {total - 1000} of {total} bytes left out ...]" in str(result.out)
    assert box.run("printf %01000d 0", PATIENT, output_bytes=1000).out.left_out == 0


def test_bytes_that_are_no_text_are_shown_escaped(box):
    assert str(box.run(r"printf 'a\xff\x00b'", PATIENT).out) == "a\\xff\x00b"


@pytest.mark.parametrize("how", ["sleep 1000", "(setsid sleep 1000 &) ; sleep 1000", "trap '' TERM; sleep 1000 & wait"])
def test_a_command_over_its_time_dies_with_its_tree_and_nothing_else(box, how: str):
    text(box, "setsid sleep 1000 >/dev/null 2>&1 &")
    start = time.monotonic()
    result = box.run(how, 0.3)
    assert result.timed_out and not result.ok and time.monotonic() - start < 10
    assert sleepers(box) == 1  # that of the earlier command
    box.stop()
    assert sleepers(box) == 0


def test_a_fork_bomb_hits_its_limit_and_is_cleared_away(box):
    result = box.run("f() { f | f & }; f; sleep 1000", 1.0)
    assert result.timed_out
    assert text(box, "ls -d /proc/[0-9]* | wc -l").strip() in {"3", "4"}  # init, bash, ls and wc


def test_a_fork_bomb_in_the_background_refuses_commands_until_it_is_stopped():
    bomb = """
import os, time
if os.fork():
    os._exit(0)
for fd in (0, 1, 2):
    os.close(fd)
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        time.sleep(0.001)
"""
    with Box(SMALL) as own:
        assert own.run([sys.executable, "-I", "-S", "-c", bomb], PATIENT).ok
        refused = 0
        for _ in range(400):  # six open files each would be more than the supervisor may have
            try:
                own.run("true", PATIENT)
            except BoxError:
                refused += 1
        assert refused > 200
        own.stop()
        assert text(own, "echo alive") == "alive\n"


def test_a_background_process_that_holds_the_output_is_not_waited_for(box):
    start = time.monotonic()
    assert str(box.run("sleep 1000 & echo done", PATIENT).out) == "done\n"
    assert time.monotonic() - start < 10
    box.stop()


def test_memory_is_capped_for_all_processes_together():
    """Each of four children alone would fit."""
    code = """if True:
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                x = b"x" * (80 << 20)
                time.sleep(2)
                os._exit(0)
        print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)])
    """
    with Box(SMALL) as own:
        result = own.run([sys.executable, "-c", code], PATIENT)
        assert result.out_of_memory and "[0, 0, 0, 0]" not in str(result.out)
        assert text(own, "echo alive") == "alive\n"


def test_files_are_capped_and_filling_them_leaves_the_box_usable():
    with Box(SMALL) as own:
        for folder in ("/app", "/tmp", "/dev/shm"):
            full = own.run(f"head -c 9000000 /dev/zero > {folder}/full", PATIENT)
            assert full.code != 0 and "No space left" in str(full.err), folder
        assert own.run("echo x > /x || echo x > /dev/x || echo x > /opt/x", PATIENT).code != 0
        assert text(own, "echo alive") == "alive\n"


@pytest.mark.parametrize(
    "attack",
    [
        "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -HUP 1; kill -USR1 1; false",
        "prlimit --pid 1 --nofile=1:1",
        "python3 -c 'import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))'",
        "renice 19 -p 1",
        "renice 19 -u $(id -u)",
        "chrt -i -p 0 1",
        "ionice -c3 -p 1",
        "taskset -p 1 1",
        "ls /proc/1/fd",
        "cat /proc/1/environ",
        "echo > /proc/1/mem",
        "nsenter -t 1 -a true",
        "unshare -U true",
        "unshare -m true",
        "bwrap --ro-bind / / true",
        "python3 -c 'import socket; socket.socket(40, 1)'",
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'",
        "python3 -c 'import fcntl; fcntl.ioctl(0, 0x5412, b\"x\")' </dev/ptmx",
        "mount -t tmpfs none /tmp",
        "chroot / true",
        "touch $(dirname $(readlink -f $(which python3)))/x",
        "cat /etc/shadow",
        "su -c true",
        "chown 0 /app",
    ],
)
def test_an_attack_on_the_box_fails_and_the_box_goes_on(box, attack: str):
    assert box.run(attack, PATIENT).code != 0
    assert text(box, "echo alive") == "alive\n"


def test_a_command_has_no_open_file_but_its_streams(box):
    assert text(box, "ls /proc/self/fd").split() == ["0", "1", "2", "3"]  # 3: ls's own


def test_orphans_that_end_are_reaped_while_the_command_goes_on_and_after_it(box):
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"
    orphans = "for i in $(seq 30); do (sleep 0.01 &) ; done; sleep 1.5"
    assert text(box, f"{orphans}; {zombies}").strip() == "0"
    text(box, "(sleep 0.3 &)")
    time.sleep(1.5)
    assert text(box, zombies).strip() == "0"


def test_two_boxes_share_neither_user_nor_files_nor_processes(box):
    with Box(SMALL) as other:
        if os.geteuid() == 0:
            assert box.uid != other.uid and text(box, "id -u").strip() == str(box.uid)
        text(box, "echo mine > /tmp/mine; sleep 1000 >/dev/null 2>&1 &")
        assert other.run("ls /tmp/mine", PATIENT).code != 0
        assert sleepers(other) == 0
    box.stop()


def test_files_go_in_and_come_out(box):
    box.put({"/app/deep/er/tool": File(b"#!/bin/sh\necho tool\n", 0o755), "/app/deep/\udcff": File(bytes(range(256)))})
    assert text(box, "deep/er/tool") == "tool\n"
    assert box.get("/app/deep/\udcff") == (bytes(range(256)), 256)
    assert box.get("/app/deep/er/tool", limit=2) == (b"#!", 20)
    with pytest.raises(BoxError, match="No such file.*'/app/none'"):
        box.get("/app/none")
    with pytest.raises(BoxError, match="Read-only file system"):
        box.put({"/usr/bin/x": File(b"")})


def test_a_fifo_blocks_neither_reading_nor_writing(box):
    text(box, "mkfifo /app/fifo")
    with pytest.raises(BoxError, match="is no regular file"):
        box.get("/app/fifo")
    with pytest.raises(BoxError, match="/app/fifo"):
        box.put({"/app/fifo": File(b"x")})


def test_what_is_collected_is_regular_and_never_through_a_link():
    with Box(SMALL) as own:
        text(own, "mkdir -p out/sub; echo a > out/a; echo b > out/sub/b; chmod 755 out/a")
        text(own, "ln -s /etc/passwd out/link; ln -s sub out/folder; mkfifo out/fifo; echo c > out/c; ln out/c out/d")
        text(own, "ln -s out through; head -c 3000 /dev/zero > big; sleep 1000 >/dev/null 2>&1 &")
        found = own.collect(["/app/out", "/app/through/a", "/app/none", "/app/big"], limit=2000)
        assert {path: file.data for path, file in found.files.items()} == {
            "/app/out/a": b"a\n",
            "/app/out/sub/b": b"b\n",
        }
        assert found.files["/app/out/a"].mode == 0o755
        assert dict(found.refused) == {
            "/app/out/link": "a link",
            "/app/out/folder": "a link",
            "/app/out/fifo": "no regular file",
            "/app/out/c": "a file with a second name",
            "/app/out/d": "a file with a second name",
            "/app/through/a": "below a link or no folder: Not a directory",
            "/app/none": "not there",
            "/app/big": "more than 2000 bytes or 4096 files in all",
        }
        assert sleepers(own) == 0
        assert len(own.collect(["/app/out"], most=1).files) == 1


def test_a_tree_that_is_deep_or_of_folders_alone_cannot_flood_what_collects_it():
    deep = "import os\nfor _ in range(300): os.mkdir('x' * 255); os.chdir('x' * 255)\nopen('y', 'w')"
    wide = "import os\nfor i in range(500): os.mkdir(f'wide/{i}')"
    with Box(SMALL) as own:
        text(own, f"mkdir deep wide; cd deep; python3 -I -S -c {shlex.quote(deep)}")
        text(own, f"python3 -I -S -c {shlex.quote(wide)}; echo z > wide/z")
        found = own.collect(["/app/deep", "/app/wide"], most=100)
        assert found.files == {}
        [(path, reason), (folder, many)] = found.refused
        assert len(path) <= 4096 + 255 and reason == "a path of more than 4096 characters"
        assert folder.startswith("/app/wide/") and many == "more than 67108864 bytes or 100 files in all"


def test_a_box_within_a_box_is_for_graders_alone():
    within = "bwrap --unshare-all --unshare-user --disable-userns --cap-drop ALL --ro-bind /usr /usr "
    within += "--symlink usr/lib /lib --symlink usr/lib64 /lib64 --symlink usr/bin /bin --proc /proc --tmpfs /tmp "
    within += "sh -c 'ls -d /proc/[0-9]*; ls /app'"
    with Box(SMALL, nesting=True) as own:
        text(own, "echo secret > /app/secret")
        result = own.run(within, PATIENT)
        assert str(result.out).split()[:1] == ["/proc/1"] and len(str(result.out).split()) < 4
        assert "No such file" in str(result.err)


def test_a_box_outlives_the_thread_that_started_it():
    """The kernel kills children with the thread, not the process, that started them."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Box(SMALL)))
    thread.start()
    thread.join()
    with made[0] as own:
        time.sleep(0.2)
        assert text(own, "echo alive") == "alive\n"


def test_a_box_that_dies_says_so_and_so_does_a_closed_one():
    with Box(SMALL) as own:
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(BoxDied, match="ended by itself"):
            own.run("true", PATIENT)
    with pytest.raises(BoxDied, match="closed"):
        own.run("true", PATIENT)


def test_closing_leaves_no_process_and_no_group():
    groups = lambda: [path for parent in cgroup._parents() for path in parent.glob(f"glm-jax-{os.getpid()}-*")]
    before = set(groups())
    own = Box(SMALL)
    text(own, "setsid sleep 1000 >/dev/null 2>&1 &")
    inside = [own.pid, *(child.pid for child in psutil.Process(own.pid).children(recursive=True))]
    assert len(inside) == 2 and (len(groups()) > len(before) or own.memory_by == "watchdog")
    own.close()
    assert gone_within(inside, 5.0) and set(groups()) == before


def test_nothing_is_left_of_a_parent_killed_with_9(tmp_path):
    mark = tmp_path / "ready"
    code = f"""
        import time
        from glm_jax.envs.sandbox.box import Box
        boxes = [Box() for _ in range(3)]
        for box in boxes:
            box.run("setsid sleep 1000 >/dev/null 2>&1 & disown", 60)
        open({str(mark)!r}, "w").close()
        boxes[0].run("sleep 1000", 1000)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        end = time.monotonic() + PATIENT
        while not mark.exists():
            assert time.monotonic() < end and parent.poll() is None
            time.sleep(0.02)
        below = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        assert len(below) >= 9  # of each box bubblewrap, supervisor and daemon
    finally:
        parent.kill()
        parent.wait()
    assert gone_within(below, 10.0)
    left = [path for folder in cgroup._parents() for path in folder.glob(f"glm-jax-{parent.pid}-*")]
    assert not left
