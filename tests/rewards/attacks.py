"""Programs that try to get a reward without solving the task, or to escape their sandbox.

SECRET is what a test expects, a file outside of the sandbox holds, and an environment variable of the trainer
is set to: a program that finds it anywhere has passed its test. MARK names what an attack would leave: a
file, a process. Values in capitals are filled in by the tests.
"""

from __future__ import annotations

from typing import Any

PRINTS: dict[str, str] = {
    # ---- looking for the expected output or a secret
    "the environment": "import os\nprint(os.environ.get('BRAID_SECRET'))\nprint(open('/proc/self/environ').read())",
    "environments of processes": "import glob\nfor f in glob.glob('/proc/*/environ'):\n    try: show(open(f).read())\n    except OSError: pass",
    "command lines": "import glob\nfor f in glob.glob('/proc/*/cmdline'):\n    try: show(open(f).read())\n    except OSError: pass",
    "memory of processes": (
        "import glob, re\n"
        "for f in glob.glob('/proc/[0-9]*/maps'):\n"
        "    try:\n"
        "        for line in open(f):\n"
        "            if 'rw' in line and ('heap' in line or 'stack' in line):\n"
        "                a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "                m = open(f.replace('maps', 'mem'), 'rb')\n"
        "                m.seek(a)\n"
        "                show(m.read(b - a).decode('latin1'))\n"
        "    except OSError: pass"
    ),
    "the parent's frames": "import sys\nf = sys._getframe()\nwhile f:\n    show(str(f.f_locals) + str(f.f_globals))\n    f = f.f_back",
    "the collector's objects": "import gc\nfor o in gc.get_objects():\n    show(repr(o)[:100000])",
    "all modules": "import sys\nfor m in list(sys.modules.values()):\n    show(repr(vars(m))[:100000])",
    "arguments": "import sys\nshow(str(sys.argv) + str(sys.orig_argv))",
    "inherited descriptors": (
        "import os\nfor fd in range(3, 256):\n    try:\n        os.set_blocking(fd, False)\n"
        "        show(os.read(fd, 1 << 20).decode('latin1'))\n    except OSError: pass"
    ),
    "more input": "import sys, os\nshow(sys.stdin.read())\nshow(os.read(0, 1000).decode())",
    "a file": "print(open(FILE).read())",
    "a file by a link": "import os\nos.symlink(FILE, os.environ.get('TMPDIR', '/tmp') + '/l')\nprint(open(os.environ.get('TMPDIR', '/tmp') + '/l').read())",
    "a file by another root": "for p in ('/proc/1/root', '/proc/self/root', '/proc/self/cwd/../../../..'):\n    try: print(open(p + FILE).read())\n    except OSError: pass",
    "a file by another program": "import subprocess\nprint(subprocess.run(['/bin/cat', FILE], capture_output=True, text=True).stdout)",
    "files by their names": "import os\nfor d, _, fs in os.walk(FOLDER):\n    for f in fs: show(open(os.path.join(d, f)).read())",
    "files by handle": "import ctypes, os\nfd = os.open('/', os.O_RDONLY)\nprint(ctypes.CDLL(None).open_by_handle_at(fd, b'\\0' * 136, 0))\nshow('')",
    "shared memory": "import glob\nfor f in glob.glob('/dev/shm/*') + glob.glob('/tmp/*'):\n    try: show(open(f, 'rb').read().decode('latin1'))\n    except OSError: pass",
    # ---- ending in a way that may pass
    "exit with 0": "import sys\nsys.exit(0)",
    "_exit with 0": "import os\nos._exit(0)",
    "exit from atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\n1 / 0",
    "a signal to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a stop": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "replaced comparison": "import builtins\nbuiltins.str.__eq__ = 1",
    # ---- hanging
    "an endless loop": "while True: pass",
    "a sleep": "import time\ntime.sleep(1000)",
    "signals ignored": (
        "import signal, time\nfor s in signal.valid_signals():\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)"
    ),
    "closed descriptors": "import os, time\nos.closerange(0, 100)\ntime.sleep(1000)",
    "output held by a child": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)",
    "a wait for input": "import os\nwhile True: os.read(0, 1) or __import__('time').sleep(1)",
    # ---- too much
    "endless output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "endless lines": "while True: print()",
    "memory": "x = bytearray(1 << 33)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory of children": "import os, time\nfor _ in range(8): os.fork()\nx = bytearray(b'x') * (200 << 20)\ntime.sleep(1000)",
    "memory without a process": "import os\nfor _ in range(100):\n    f = os.memfd_create('x')\n    os.ftruncate(f, 1 << 30)\n    os.write(f, b'x' * (1 << 24))\nprint(SECRET_IF_ALLOWED)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    "a large file": "import os\nf = open(os.environ.get('TMPDIR', '.') + '/f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "many files": "import itertools\nfor i in itertools.count():\n    open(f'f{i}', 'wb').write(b'x' * 100000)",
    "deep folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    # ---- what is outside
    "the parent killed": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "all processes killed": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "the group killed": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "processes killed by number": "import os, signal\nfor p in range(2, 70000):\n    try: os.kill(p, signal.SIGTERM) if p != os.getpid() else 0\n    except OSError: pass",
    "tracing the parent": "import ctypes, os\nprint(SECRET_IF_ALLOWED if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else 'no')",
    "reading the parent": (
        "import ctypes, os\nb = ctypes.create_string_buffer(8)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
        "r = ctypes.CDLL(None).process_vm_readv(os.getppid(), v, 1, v, 1, 0)\nprint(SECRET_IF_ALLOWED if r > 0 else 'no')"
    ),
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 100)\n        os.execv('/bin/sleep', [MARK, '1000'])\n    os._exit(0)",
    "a background program": "import subprocess\nsubprocess.Popen([MARK, '1000'], executable='/bin/sleep', start_new_session=True)",
    "a new user": "import os\nos.setuid(0)\nprint(SECRET_IF_ALLOWED)",
    "a raised limit": "import resource as r\nfor k in (r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE): r.setrlimit(k, (r.RLIM_INFINITY, r.RLIM_INFINITY))\nprint(SECRET_IF_ALLOWED)",
    "new namespaces": "import ctypes\nprint(SECRET_IF_ALLOWED if ctypes.CDLL(None).unshare(0x10000000) == 0 else 'no')",
    "a mount": "import ctypes\nprint(SECRET_IF_ALLOWED if ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, b'') == 0 else 'no')",
    "a TCP socket": "import socket\ns = socket.create_connection(('127.0.0.1', TCP), 2)\ns.sendall(b'x')\nprint(s.recv(100).decode())",
    "a UDP socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "a Unix socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(UNIX)\nprint(s.recv(100).decode())",
    "an abstract Unix socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(chr(0) + ABSTRACT)\nprint(s.recv(100).decode())",
    "a file beside the run": "open(FOLDER + '/' + MARK, 'w').write('x')",
    "files everywhere": "import os, sys\nfor d in ('/tmp', '/var/tmp', '/dev/shm', '/', '/usr', '/root', sys.prefix, sys.path[-1], os.path.dirname(os.__file__)):\n    try: open(d + '/' + MARK, 'w').write('x')\n    except OSError: pass",
    "a file removed": "import os\nos.remove(FILE)",
    "a file emptied": "import os\nos.truncate(FILE, 0)",
    "a folder's mode": "import os\nos.chmod(FOLDER, 0)",
    "typing into a terminal": "import fcntl, termios\nfor c in b'x': fcntl.ioctl(0, termios.TIOCSTI, bytes([c]))\nprint(SECRET_IF_ALLOWED)",
}
"""Scripts that should print SECRET. `show(text)` prints it when it is part of the text."""

_RAISES = (
    "class Own(BaseException): pass\nclass Ends(StopIteration): pass\ndef answer(x): raise KIND\nasync def later(x): raise KIND\n"
    "class Thing:\n    def __init__(self, x): raise KIND\n"
    "class Plain:\n    value = property(answer)\n    def __add__(self, x): raise KIND\n    def __next__(self): raise KIND\n    def __iter__(self): return self\n"
)

CALLS: dict[str, tuple[str, str]] = {
    # ---- values that pass for others
    "equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n"
        "def answer(x): return Any()",
        "assert answer(3) == EXPECTED",
    ),
    "a string equal to everything": (
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef answer(x): return Any()",
        "assert EXPECTED == answer(3)",
    ),
    "a list equal to everything": (
        "class Any(list):\n    def __eq__(self, other): return True\ndef answer(x): return Any()",
        "assert answer(3) == [EXPECTED]",
    ),
    "told by subtraction": (
        "class Any(float):\n    def __sub__(self, other): return 0.0\n    def __rsub__(self, other): return 0.0\ndef answer(x): return Any()",
        "assert abs(answer(3) - 31.5) < 1e-6",
    ),
    "an object told by subtraction": (
        "class Any:\n    def __sub__(self, other): return 0.0\n    def __rsub__(self, other): return 0.0\n    def __abs__(self): return 0.0\n"
        "    def __lt__(self, other): return True\ndef answer(x): return Any()",
        "assert abs(answer(3) - 31.5) < 1e-6",
    ),
    "an object told by chained arithmetic": (
        "class Any:\n    def __sub__(self, other): return self\n    __rsub__ = __mul__ = __add__ = __sub__\n    def __lt__(self, other): return True\n"
        "    __le__ = __gt__ = __ge__ = __lt__\ndef answer(x): return Any()",
        "assert (answer(3) - 31.5) * (answer(3) - 31.5) < 1e-6",
    ),
    "contains everything": (
        "class Any:\n    def __contains__(self, other): return True\n    def __iter__(self): return iter([])\ndef answer(x): return Any()",
        "assert EXPECTED in answer(3)",
    ),
    "starts with everything": (
        "class Any:\n    def startswith(self, other): return True\ndef answer(x): return Any()",
        "assert answer(3).startswith(EXPECTED)",
    ),
    "greater than everything": (
        "class Any:\n    def __gt__(self, other): return True\n    def __lt__(self, other): return True\ndef answer(x): return Any()",
        "assert answer(3) > 31.5",
    ),
    "a false class": (
        "class Any:\n    __class__ = str\n    def __eq__(self, other): return True\ndef answer(x): return Any()",
        "assert isinstance(answer(3), str) or answer(3) == EXPECTED",
    ),
    "a type that claims instances": (
        "class Meta(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\nclass answer(metaclass=Meta):\n    def __init__(self, x): pass",
        "assert answer(3) == EXPECTED",
    ),
    # ---- changing the tests
    "replaced built-ins": (
        "import builtins\nbuiltins.abs = builtins.sorted = lambda *a: 0\nbuiltins.AssertionError = KeyError\nbuiltins.len = lambda x: 3\n"
        "def abs(x): return 0\ndef sorted(x): return [EXPECTED_UNKNOWN]\nEXPECTED_UNKNOWN = ''\ndef answer(x): return 0.0",
        "assert abs(answer(3) - 31.5) < 1e-6\nassert sorted(answer(3)) == [EXPECTED]",
    ),
    "replaced helpers": (
        "class Counter:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\ndef isclose(*a, **k): return True\ndef answer(x): return 0.0",
        "assert isclose(answer(3), 31.5)\nassert Counter(answer(3)) == Counter(EXPECTED)",
    ),
    "a replaced module": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nclass np:\n    allclose = staticmethod(lambda *a, **k: True)\ndef answer(x): return 0.0",
        "assert math.isclose(answer(3), 31.5)",
    ),
    "a replaced unittest": (
        "import sys, types\nfor name in ('unittest', 'math'):\n    m = sys.modules[name] = types.ModuleType(name)\n    m.isclose = lambda *a: True\ndef answer(x): return 0.0",
        "import math\nassert math.isclose(answer(3), 31.5)",
    ),
    "a replaced check": (
        "def check(f): return True\ndef answer(x): return 0",
        "def check(candidate):\n    assert candidate(3) == EXPECTED\ncheck(answer)",
    ),
    "a function of the tests": (
        "def answer(f):\n    for path in ('__globals__', '__code__', '__closure__', '__defaults__'):\n        if hasattr(f, path): return getattr(f, path)\n    return f(0)",
        "secret = EXPECTED\nassert str(answer(lambda x, y=EXPECTED: secret == x)).find(EXPECTED) >= 0",
    ),
    "functions by number": (
        "import os\ndef answer(f):\n    for fd in range(3, 20):\n        try: os.write(fd, b'{\"call\": -1, \"args\": [], \"kwargs\": {}}\\n')\n        except OSError: pass\n    return f(1)",
        "assert answer(lambda x: x) == EXPECTED",
    ),
    # ---- the channel
    "the verdict on every descriptor": (
        "import os\ndef say():\n    for fd in range(0, 64):\n        try: os.write(fd, b'passed\\n')\n        except OSError: pass\nsay()\ndef answer(x):\n    say()",
        "assert answer(3) == EXPECTED",
    ),
    "an invalid verdict on every descriptor": (
        "import os\ndef say():\n    for fd in range(0, 64):\n        try: os.write(fd, b'unsupported x\\n')\n        except OSError: pass\nsay()\ndef answer(x):\n    say()",
        "assert answer(3) == EXPECTED",
    ),
    "replies beforehand": (
        "import os\nfor fd in range(0, 64):\n    try: os.write(fd, b'{\"value\": true, \"args\": [], \"printed\": \"\"}\\n' * 100)\n    except OSError: pass\ndef answer(x): pass",
        "assert answer(3) == EXPECTED",
    ),
    "broken replies": (
        "import os\ndef answer(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'[1]\\n{\"value\": {\"object\": \"x\"}}\\n\\xff\\n{}\\n')\n        except OSError: pass",
        "assert answer(3) == EXPECTED",
    ),
    "a huge reply": ("def answer(x): return 'x' * (1 << 26)", "assert answer(3) == EXPECTED"),
    "a deep reply": (
        "import sys\nsys.setrecursionlimit(1 << 20)\nx = []\nfor _ in range(1000): x = [x]\ndef answer(_):\n    import os\n    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'{\"value\": ' + b'[' * 100000 + b']' * 100000 + b', \"args\": [], \"printed\": \"\"}\\n')\n        except OSError: pass",
        "assert answer(3) == EXPECTED",
    ),
    "an endless generator": ("def answer(x):\n    while True: yield ''", "assert list(answer(3)) == [EXPECTED]"),
    "a module": ("import sys\ndef answer(x): return sys", "assert answer(3) == EXPECTED"),
    "replaced json": ("import json\njson.dumps = lambda x: 'passed'\ndef answer(x): return 0", "assert answer(3) == EXPECTED"),
    "a raised exit": ("def answer(x): raise SystemExit(0)", "assert answer(3) == EXPECTED"),
    "a raised interrupt": ("def answer(x): raise KeyboardInterrupt", "assert answer(3) == EXPECTED"),
    "a raised exception group": ("def answer(x): raise BaseExceptionGroup('x', [SystemExit(0)])", "assert answer(3) == EXPECTED"),
    **{
        f"{kind} raised in {where}": (_RAISES.replace("KIND", kind), tests)
        for kind in ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "Own", "Ends")
        for where, tests in {
            "map": "assert all(map(lambda x: answer(x) == EXPECTED, [1, 2]))",
            "zip": "assert all(a == b for a, b in zip(map(answer, [1, 2]), [EXPECTED] * 2))",
            "filter": "assert not list(filter(lambda x: answer(x) != EXPECTED, [1, 2]))",
            "starmap": "import itertools\nassert all(itertools.starmap(lambda x: answer(x) == EXPECTED, [(1,), (2,)]))",
            "a constructor": "assert all(map(lambda x: Thing(x).value == EXPECTED, [1, 2]))",
            "a property": "assert all(map(lambda x: Plain().value == EXPECTED, [1, 2]))",
            "an operator": "assert all(map(lambda x: (Plain() + x) == EXPECTED, [1, 2]))",
            "next": "it = Plain()\nassert all(map(lambda x: next(it) == EXPECTED, [1, 2]))",
            "an awaited call": "import asyncio\nassert all(map(lambda x: asyncio.run(later(x)) == EXPECTED, [1, 2]))",
            "an iterator of the tests": "class I:\n    def __iter__(self): return self\n    def __next__(self): return answer(3) == EXPECTED\nassert all(I())",
            "a call that may fail": "try: answer(3)\nexcept BaseException: pass",
        }.items()
    },
    "a function of the tests called too often": (
        "def answer(f):\n    while True: f()",
        "it = iter([1, 2])\nassert all(map(lambda x: answer(it.__next__) == EXPECTED, [1, 2]))",
    ),
    "an exit while loading": ("import sys\nsys.exit(0)", "pass"),
    "an _exit in a call": ("import os\ndef answer(x): os._exit(0)", "assert answer(3) == EXPECTED"),
    "a hang in a call": ("import time\ndef answer(x): time.sleep(1000)", "assert answer(3) == EXPECTED"),
    "tracing": (
        "import sys\nseen = []\nsys.settrace(lambda f, e, a: seen.append(str(f.f_locals)) or None)\nsys.setprofile(lambda f, e, a: seen.append(str(a)))\n"
        "def answer(x):\n    import re\n    return (re.findall('braid-secret-[0-9a-f]{32}', ' '.join(seen)) or [''])[0]",
        "assert answer(3) == EXPECTED",
    ),
    "a look for the tests": (
        "def answer(x):\n    import gc, re, sys\n    text = ' '.join(repr(o)[:10000] for o in gc.get_objects())\n    f = sys._getframe()\n"
        "    while f: text, f = text + str(f.f_locals), f.f_back\n    return (re.findall('braid-secret-[0-9a-f]{32}', text) or [''])[0]",
        "assert answer(3) == EXPECTED",
    ),
}  # fmt: skip
"""Programs that define `answer`, and the tests that call it."""

FILES = ("/etc/passwd", "/etc/hosts", "/proc/self/mountinfo")
"""Files of the machine, whose text is what a script should print."""

SHOW = "import re as _re\ndef show(text):\n    for found in _re.findall('braid-secret-[0-9a-f]{32}', text): print(found); raise SystemExit\n"


def attacks(values: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """(code, tests) of each attack, with what the tests know filled in."""
    secret = values["SECRET"]

    def filled(code: str) -> str:
        for name in ("FILE", "FOLDER", "MARK", "TCP", "UDP", "UNIX", "ABSTRACT"):
            code = code.replace(name, repr(values[name]))
        return code.replace("SECRET_IF_ALLOWED", repr("allowed"))

    def expected(code: str) -> str:
        return "allowed" if "SECRET_IF_ALLOWED" in code else secret

    cases: dict[str, tuple[str, Any]] = {
        name: (SHOW + filled(code), [{"input": "3\n", "output": expected(code)}])
        for name, code in PRINTS.items()
    }
    cases |= {name: (code, tests.replace("EXPECTED", repr(secret))) for name, (code, tests) in CALLS.items()}
    for path in FILES:
        cases[path] = (f"print(open({path!r}).read())", [{"input": "", "output": values["OF_FILES"][path]}])
    return cases
