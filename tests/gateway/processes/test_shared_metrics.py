"""Counters of several processes, read by each of them."""

import os
import subprocess
import sys
from pathlib import Path

# Fails if it opens a file where others read: the file would be empty for a moment.
JOIN = """
import os, sys
shared, opened = os.environ["PROMETHEUS_MULTIPROC_DIR"], []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from gateway.processes.shared_metrics import join_metrics
join_metrics()
from gateway import metrics
metrics.collapsed.inc()
metrics.requests.labels("chat.completions", "miss", "none").inc(2)
metrics.memory_entries.set(5)
metrics.flush()
files = [path for path in opened if path.endswith(".db")]
sys.stdin.read()
sys.exit(not files or any(os.path.dirname(path) == shared for path in files))
"""

READ = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from gateway import metrics
for line in sys.stdin:
    figures = {name: value for name, labels, value in metrics.samples()}
    print(*(figures.get(f"keepgate_{name}", 0.0) for name in
            ("collapsed_requests_total", "requests_total", "memory_entries")), flush=True)
"""


def test_new_processes_are_counted_and_break_no_reading(tmp_path: Path) -> None:
    """Every reading succeeds while processes start, and later is the sum of all."""
    count = 4
    reader = subprocess.Popen(
        [sys.executable, "-c", READ, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    workers = [
        subprocess.Popen([sys.executable, "-c", JOIN], stdin=subprocess.PIPE, env=environment) for _ in range(count)
    ]
    assert reader.stdin is not None
    assert reader.stdout is not None
    figures = ""
    try:
        while figures != f"{count}.0 {2 * count}.0 {5 * count}.0":
            reader.stdin.write("\n")
            reader.stdin.flush()
            figures = reader.stdout.readline().strip()
            assert figures, "the reader failed; what it says is above"
    finally:
        for worker in workers:
            worker.communicate()
        reader.communicate()
    assert [process.returncode for process in workers] == [0] * count
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_full_disk_kills_no_process(tmp_path: Path) -> None:
    """Files that are mapped have their whole place on the disk: what is written there later needs no more."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", JOIN], stdin=subprocess.DEVNULL, env=environment, check=True)
    files = [path.stat() for path in tmp_path.iterdir()]
    assert files
    assert all(file.st_blocks * 512 >= file.st_size > 0 for file in files)
