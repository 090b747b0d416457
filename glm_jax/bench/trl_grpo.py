"""TRL's side of `bench rl`: GRPO at its fastest setting on the same model shape and work. Run by glm_jax.bench.rl.

Imports nothing of ours but the shape, so it runs in an environment that has torch, transformers and trl alone.
"""

from __future__ import annotations

import sys
import tempfile

import torch


def main(size: str) -> None:
    # duel and shape lie beside this script, where Python finds them: importing the package would want jax.
    import duel
    import shape
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    work = shape.SMOKE if size == "smoke" else shape.FULL
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(**{k: v for k, v in shape.MODEL.items() if k != "model_type"}, pad_token_id=0)
    model = GlmMoeDsaForCausalLM(config)

    words = {f"t{i}": i for i in range(config.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", bos_token="t2")
    draw = torch.Generator().manual_seed(0)
    prompt = lambda: " ".join(f"t{i}" for i in torch.randint(3, 320, (work.prompt,), generator=draw).tolist())
    data = Dataset.from_dict({"prompt": [prompt() for _ in range(4096)]})

    def reward(completion_ids, **_):
        return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

    marks: dict[str, float] = {}

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = duel.cpu_seconds()
            out = super()._generate_single_turn(*args, **kwargs)
            marks["sample"] = marks.get("sample", 0.0) + duel.cpu_seconds() - start
            return out

        def training_step(self, *args, **kwargs):
            # One optimiser step is one iteration: waits for its turn, and tells what the last one took.
            if "start" in marks:
                total = duel.cpu_seconds() - marks["start"]
                tell(
                    {
                        "sample": marks["sample"],
                        "learn": total - marks["sample"],
                        "total": total,
                        "peak_mib": duel.peak_mib(),
                    }
                )
            wait()
            marks.update(start=duel.cpu_seconds(), sample=0.0)
            return super().training_step(*args, **kwargs)

    import json

    def tell(figures: dict) -> None:
        print(json.dumps(figures), flush=True)

    def wait() -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=work.completions,
            num_generations=8,
            max_completion_length=work.new,
            generation_kwargs={"min_new_tokens": work.new},
            temperature=1.0,
            beta=0.0,
            num_iterations=1,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
            max_steps=10_000,
        )
        trainer = Timed(model=model, args=args, reward_funcs=reward, train_dataset=data, processing_class=tokenizer)
        tell({"ready": True, "version": trl.__version__})
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
