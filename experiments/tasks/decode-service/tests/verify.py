"""The model is here: a keyed hash of the whole text, which nobody can continue without asking. So are the counters."""

import hashlib
import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402

VOCABULARY = 97


class Service:
    def __init__(self, key, prompts, count):
        self.key, self.prompts, self.count = key, prompts, count
        self.states = [()]
        distinct = {tuple(prompt) for prompt in prompts}
        beginnings = {prompt[:i] for prompt in distinct for i in range(1, len(prompt) + 1)}
        self.most_fed, self.most_calls = len(beginnings) + (count - 1) * len(distinct), max(map(len, prompts)) + count
        self.fed = self.calls = 0
        self.texts = None

    def following(self, text):
        return int.from_bytes(hashlib.blake2b(repr(text).encode(), key=self.key, digest_size=8).digest()) % VOCABULARY

    def handle(self, request):
        if not isinstance(request, dict):
            raise grader.Failed("a request is a table")
        if request.get("ask") == "prompts":
            return {"prompts": self.prompts, "tokens": self.count}
        if request.get("ask") == "step":
            parts = request.get("parts")
            if not isinstance(parts, list):
                raise grader.Failed("a step has parts")
            if len(parts) > self.most_fed:
                raise grader.Failed(f"{len(parts)} parts in a step; {self.most_fed} tokens may be fed in all")
            self.calls += 1
            if self.calls > self.most_calls:
                raise grader.Failed(f"more than {self.most_calls} calls")
            return {"parts": [self.step(part) for part in parts]}
        if request.get("ask") == "done" and self.texts is None:
            self.texts = request.get("texts")
            return {}
        raise grader.Failed(f"{str(request)[:100]} is no request")

    def step(self, part):
        if not (isinstance(part, list) and len(part) == 2 and isinstance(part[1], list)):
            raise grader.Failed(f"{str(part)[:100]} is no part")
        state, tokens = part
        if state is not None and (type(state) is not int or not 0 < state < len(self.states)):
            raise grader.Failed(f"{str(state)[:50]} is no state")
        if any(type(token) is not int for token in tokens):
            raise grader.Failed("tokens are integers")
        text = self.states[state or 0] + tuple(tokens)
        self.fed += len(tokens)
        if self.fed > self.most_fed:
            raise grader.Failed(f"more than {self.most_fed} tokens fed")
        self.states.append(text)
        return [len(self.states) - 1, self.following(text)]

    def wanted(self, prompt):
        text = tuple(prompt)
        for _ in range(self.count):
            text += (self.following(text),)
        return list(text[len(prompt) :])


def draw(rng, branches):
    """Prompts that share beginnings; some twice, some the beginning of another."""
    common = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 12))] for _ in range(branches)]
    prompts = [rng.choice(common)[: rng.randint(1, 12)] for _ in range(6)]
    prompts += [rng.choice(common) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))] for _ in range(8)]
    return [*prompts, rng.choice(prompts)]


def verify():
    rng = grader.rng()
    key = rng.randbytes(32)
    spent = []
    for branches, count in ((1, 1), (1, 6), (3, 9)):
        prompts = draw(rng, branches)
        service = Service(key, prompts, count)
        grader.serve([grader.PYTHON, "-I", "-S", "/app/decode.py"], service.handle, timeout=5.0)
        if not grader.same(service.texts, [service.wanted(prompt) for prompt in prompts]):
            raise grader.Failed("the continuations are not the model's")
        spent.append(service.fed / service.most_fed)
    return {"tokens_over_bound": max(spent)}


grader.main(verify)
