"""WebShop: steps a second on one core, bytes of a clone, and memory of many workers that share one store.

    python -m benchmarks.bench_webshop --json benchmarks/results/webshop.json
    python -m benchmarks.bench_webshop --workers 32 --json benchmarks/results/webshop_memory.json

Episodes act at random: a fifth of the commands searches for words of the shopper's own instruction, drawn anew, so that
nearly no search was made before; the rest are clicks that the page offers. Choosing the commands is not timed. `ms` is
one step of one world. With --workers that many processes play at the same time, and the memory of each is read from
/proc: PSS counts a page that n processes share as 1/n in each.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, output_file
from benchmarks.bench_data import cpu
from manus_fast import envs
from manus_fast.versions import git_commit

WORLDS = 64


def play(environment: Any, steps: int, seed: int, expert: bool = False) -> tuple[float, dict[str, float]]:
    """(seconds that `steps` steps of one world took, figures about them)."""
    rng = random.Random(seed)
    tasks = environment.tasks("train")
    batch = environment.make_batch(WORLDS)
    reader = envs.make("webshop").make_batch(1)  # instructions as text, whatever the mode
    slots = list(range(WORLDS))
    words: list[list[str]] = [[] for _ in slots]
    infos: list[dict[str, Any]] = [{} for _ in slots]

    def restart(ended: list[int]) -> float:
        chosen = [rng.choice(tasks) for _ in ended]
        began = time.perf_counter()
        _, fresh = batch.reset(ended, chosen, [0] * len(ended))
        taken = time.perf_counter() - began
        for slot, task, info in zip(ended, chosen, fresh, strict=True):
            words[slot] = re.findall(r"[a-z]+", reader.reset([0], [task], [0])[0][0].lower())
            infos[slot] = info
        return taken

    restart(slots)
    spent, searches, characters, done, sizes, queries = 0.0, 0, 0, 0, [], set()
    while done < steps:
        actions = batch.expert(slots)[0] if expert else []
        for slot in slots if not expert else ():
            if not infos[slot]["admissible"] or rng.random() < 0.2:
                actions.append(f"search[{' '.join(rng.sample(words[slot], 5))}]")
            else:
                actions.append(rng.choice(infos[slot]["admissible"]))
        found = [action for action in actions if action.startswith("search")]
        searches += len(found)
        queries.update(found)
        began = time.perf_counter()
        texts, _, terminated, truncated, infos = batch.step(slots, actions)
        spent += time.perf_counter() - began
        done += WORLDS
        characters += sum(map(len, texts))
        sizes.append(len(batch.save(slots[done % WORLDS])))
        over = [slot for slot in slots if terminated[slot] or truncated[slot]]
        if over:
            spent += restart(over)
    return spent, {
        "searches": searches / done,
        "different_searches": len(queries) / max(1, searches),
        "characters": characters / done,
        "saved_bytes": statistics.fmean(sizes),
        "saved_bytes_max": max(sizes),
        "steps": done,
    }


def clone_bytes(environment: Any, count: int = 4096) -> float:
    """Bytes of memory that a clone of a world in mid-episode takes, as the allocator sees it, first step included."""
    batch = environment.make_batch(count + 1)
    batch.reset([0], environment.tasks("train")[:1], [0])
    for _ in range(3):
        batch.step([0], batch.expert([0])[0])
    tracemalloc.start()
    for slot in range(1, count + 1):
        batch.clone(0, slot)
        batch.step([slot], ["click[no such thing]"])  # one state of its own
    taken = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return taken


def memory() -> dict[str, float]:
    """MiB of this process: all of it, and what of it the store's files are."""
    pss, mapped, name, rss = 0.0, 0.0, "", 0.0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            name = head[5] if len(head) > 5 else ""
        elif head[0] in ("Pss:", "Rss:"):
            size = int(head[1]) / 1024
            pss += size if head[0] == "Pss:" else 0
            if "/webshop/" in name:
                mapped += size if head[0] == "Pss:" else 0
                rss += size if head[0] == "Rss:" else 0
    return {"pss": pss, "store_pss": mapped, "store_rss": rss}


def shared(count: int, steps: int) -> dict[str, Any]:
    """Memory of `count` processes that play at the same time, in MiB."""
    program = f"from benchmarks.bench_webshop import worker; worker({steps})"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in processes:  # all have played before one of them measures
        assert process.stdout is not None
        process.stdout.readline()
    rows = []
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("measure\n")
        process.stdin.flush()
        rows.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate("end\n")
    return {name: sum(row[name] for row in rows) for name in rows[0]} | {
        "workers": count, "base_pss": sum(row["base"] for row in rows),
    }  # fmt: skip


def worker(steps: int) -> None:
    """One process of `shared`: plays, then says how much memory it has when asked."""
    base = memory()["pss"]
    spent, figures = play(envs.make("webshop"), steps, seed=random.SystemRandom().randrange(1 << 30))
    print("played", flush=True)
    sys.stdin.readline()
    print(json.dumps({**memory(), "base": base, "steps_per_s": figures["steps"] / spent}), flush=True)
    sys.stdin.readline()  # stays until all have measured


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("webshop", __doc__)
    parser.add_argument("--json", type=output_file, help="write the rows to this file")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--modes", nargs="+", default=["text", "text_rich", "html", "url"])
    parser.add_argument("--workers", type=int, default=0, help="measure the memory of this many processes instead")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    envs.make("webshop").tasks("test")
    print(f"store open after {time.perf_counter() - began:.2f} s")
    if args.workers:
        rows = [{"op": "webshop", "case": "memory in MiB", **shared(count, 2000)} for count in (1, args.workers)]
        for row in rows:
            print(json.dumps(row))
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
        return
    rows = []
    about = {"cpu": cpu(), "commit": git_commit(), "worlds": WORLDS}
    for mode in args.modes:
        for expert in (False, True) if mode == "text" else (False,):
            environment = envs.make("webshop", mode=mode)
            play(environment, 2000, seed=1, expert=expert)
            spent, figures = play(environment, args.steps, seed=0, expert=expert)
            case = {"case": f"{mode}, {'expert' if expert else 'random'}", "ms": spent / figures["steps"] * 1e3}
            rows.append(
                {"op": "webshop", "pass": "step", "backend": "python", **case, **figures, **about}
                | {"steps_per_s": figures["steps"] / spent}
            )
            print(json.dumps(rows[-1]), flush=True)
    size = clone_bytes(envs.make("webshop"))
    rows.append({"op": "webshop", "pass": "clone", "backend": "python", "case": "text", "bytes": size, **about})
    print(f"a clone: {size:.0f} bytes")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
