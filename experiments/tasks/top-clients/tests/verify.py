"""Folders of drawn logs, with the names and lines that scripts stumble over."""

import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402

PATHS = ("/", "/a b", "/x?y=2 3", "/%20", "/200 17", "/log in as 404 me")


def draw(rng, names):
    """Files of a folder, and the bytes of each client in them."""
    clients = [f"10.{rng.randint(0, 3)}.{rng.randint(0, 30)}.{i}" for i in range(9)]
    files, total = {}, {}
    for name in names:
        lines = []
        for _ in range(rng.randint(0, 60)):
            client, status = rng.choice(clients), rng.choice((200, 200, 200, 206, 299, 301, 304, 404, 500))
            size = rng.choice((None, 0, 100, 200, rng.randint(1, 10**7)))
            user = rng.choice(("-", "ann"))
            lines.append(
                f"{client} - {user} [0{rng.randint(1, 9)}/Mar/2026:10:00:00 +0000] "
                f'"GET {rng.choice(PATHS)} HTTP/1.1" {status} {"-" if size is None else size}\n'
            )
            if 200 <= status < 300 and name.endswith(".log") and "/" not in name:
                total[client] = total.get(client, 0) + (size or 0)
        files[f"logs/{name}"] = "".join(lines).encode()
    return files, total


def verify():
    rng = grader.rng()
    folders = [
        ["web.log"],
        ["web.log", "web 2.log", "odd'name.log", "notes.txt", "web.log.bak", "old/web.log"],
        ["a b c.log", "log", "x.logs"],
        ["notes.txt"],
    ]
    for names in folders:
        files, total = draw(rng, names)
        ranked = sorted((-size, client) for client, size in total.items() if size)
        for most in (3, 100):
            want = "".join(f"{-size} {client}\n" for size, client in ranked[:most]).encode()
            got = grader.output(["/bin/bash", "/app/top.sh", "/data/logs", str(most)], files=files, timeout=10.0)
            if got != want:
                raise grader.Failed(f"of {names}, the first {most}: {got[:200]!r}, not {want[:200]!r}")


grader.main(verify)
