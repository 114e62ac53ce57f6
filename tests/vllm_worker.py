"""One rank of the run that test_vllm_ranks.py starts: `python vllm_worker.py FILE`; rank 0 writes FILE."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from test_vllm_engine import make_engine, make_model, weights

from manus_fast.ranks import connect
from manus_fast.rollout.engine import Request, generate

REQUESTS = 5


def sampled(ranks):
    """(id, token ids, log-probabilities) of every request, under one set of weights and then under another."""
    engine = make_engine(max_slots=8, max_length=128)
    found = []
    for number in range(2):
        if number:
            engine.load(weights(make_model(number)), number)
        mine = ranks.share(REQUESTS)
        requests = [
            Request(i, np.arange(5, 15 + i, dtype=np.int32), seed=7 + i, max_tokens=12, temperature=1.0) for i in mine
        ]
        done = generate(engine, requests) if requests else []
        found.append(ranks.gather([(c.id, c.ids.tolist(), c.log_probs.tolist()) for c in done]))
    try:
        make_engine()
    except ValueError as error:
        return found, str(error)
    return found, ""


def main(file):
    ranks = connect()
    found, refused = sampled(ranks)
    total = torch.full((2,), float(ranks.rank + 1), device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(total)  # the ranks' own channel still serves
    if ranks.first:
        Path(file).write_text(json.dumps({"found": found, "refused": refused, "total": total.tolist()}))
    ranks.wait()


if __name__ == "__main__":
    main(sys.argv[1])
