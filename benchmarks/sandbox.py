"""Time to start a sandbox for code rewards and to run an empty program in it: python -m benchmarks.sandbox"""

from __future__ import annotations

import statistics
import time

from braid.errors import ConfigError
from braid.isolation.sandbox import Limits, adopt_orphans, find_isolation, kill_children
from braid.rewards.programs import ProgramTest, passes

REPEATS = 20


def main() -> None:
    adopt_orphans()
    for asked in ("bubblewrap", "sandlock", "process"):
        try:
            isolation = find_isolation(asked)
        except ConfigError as error:
            print(f"{asked}: {error}")
            continue
        for name, test in (("prints", ProgramTest()), ("assertions", ProgramTest("pass"))):
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                assert passes("", test, isolation, Limits(10.0, 1 << 30))
                kill_children()
                times.append(time.perf_counter() - start)
            times.sort()
            print(
                f"{isolation}, {name}: median {statistics.median(times) * 1e3:.0f} ms, least "
                f"{times[0] * 1e3:.0f} ms"
            )


if __name__ == "__main__":
    main()
