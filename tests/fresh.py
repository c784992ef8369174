"""Programs in processes of their own that have imported torch and nothing else: forks of one that did. The import and an interpreter's
end take 3 s, a fork that leaves them out 10 ms.

What an interpreter reads when it starts (flags, locale, hash seeds), what torch reads when it is imported, and how an interpreter ends are
not the program's own: a program that is about such a thing is started by `subprocess`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = os.pathsep.join(map(str, (HERE.parent / "src", HERE)))
SERVER = """
import atexit, json, os, signal, sys, threading, traceback, types
import torch

assert len(os.listdir("/proc/self/task")) == 1, "threads do not live on in forks"
asked, path = sys.stdin, sys.path[1:]
for line in asked:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for fd, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(os.path.join(request["folder"], name), os.O_WRONLY | os.O_CREAT), fd)
signal.alarm(1200)
os.environ.clear()
os.environ.update(request["env"])
os.chdir(request["cwd"])
sys.argv, sys.path = ["-c", *request["args"]], ["", *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep)), *path]
main, status = types.ModuleType("__main__"), 0
sys.modules["__main__"] = main
try:
    exec(compile(request["program"], "<string>", "exec"), vars(main))
except SystemExit as e:
    status = e.code if isinstance(e.code, int) else int(e.code is not None)
except BaseException as e:
    traceback.print_exception(e.with_traceback(e.__traceback__.tb_next))
    status = 1
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
_SERVERS: dict[int, subprocess.Popen[str]] = {}  # by the process that started it


def _server() -> subprocess.Popen[str]:
    server = _SERVERS.get(os.getpid())
    if server is None or server.poll() is not None:
        env = os.environ | {"PYTHONPATH": "", "OPENBLAS_NUM_THREADS": "1"}  # NumPy would start threads
        pipe = subprocess.PIPE
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=env)
        _SERVERS[os.getpid()] = server  # ends when its input does
    return server


def run(program: str, *args: object, cwd: object = None, **env: str) -> subprocess.CompletedProcess[str]:
    """What `python -c program args` does in this environment and `env`, with this checkout and what tests share in its path."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {"program": program, "args": [str(a) for a in args], "cwd": str(cwd or os.getcwd()), "folder": folder,
                   "env": os.environ | {"PYTHONPATH": PATHS} | env}  # fmt: skip
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the first process ended"
        out, err = (Path(folder, name).read_text(errors="replace") if Path(folder, name).exists() else "" for name in ("out", "err"))
    return subprocess.CompletedProcess(["python", "-c", program], int(status), out, err)
