"""Training loop of your own, which gives the same bits as `qarl train` with the embedded default.

python examples/own_loop.py STEPS
"""

import sys

import torch

import qarl

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def reward(problem, answer):
    """Return 1.0 for the expected answer, else 0.0."""
    return float(answer.text.strip() == problem.answer)


def train(steps, model="tiny-qwen3", prompts=128):
    """Train and yield each step's mean reward and the digest of the published version."""
    policy = qarl.align(model, "w4a16")
    task = qarl.load_task(qarl.TaskConfig(name="chain_sum", options=SUMS))
    matrices, others = policy.muon_groups()
    muon = torch.optim.Muon(matrices, lr=8e-4, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=8e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    with qarl.engine(policy, max_prompt_tokens=64, max_new_tokens=8, max_num_seqs=512) as engine:
        for step in range(steps):
            problems = task.problems("train", step * prompts, prompts, 0)
            seed = qarl.step_seed(0, step)
            # sample and score
            sampled = engine.generate(problems, samples=8, seed=seed)
            groups = []
            for problem, answers in zip(problems, sampled, strict=True):
                scores = tuple(reward(problem, answer) for answer in answers)
                groups.append(qarl.Group(engine.prompt(problem), tuple(answers), scores))
            batch = qarl.make_batch(groups).to(policy.device)
            # learn in two updates, each on half of the batch
            with torch.no_grad():
                old = policy.batch_logprobs(batch)
            for rows in qarl.mini_batches(batch, 2, seed):
                part = batch.rows(rows)
                # `part` is padded to its own longest sequence, so its log-probs may be narrower
                old_part = old[rows][:, : part.tokens.shape[1] - 1]
                loss = qarl.losses.tbpo(
                    policy.batch_logprobs(part),
                    old_part,
                    part.sampler_logprobs,
                    part.advantages,
                    part.response_mask,
                    epsilon_high=0.1,
                    delta_high=0.1,
                    delta_low=0.1,
                )
                loss.loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
                policy.refresh()  # makes the next weight version from the masters
            mean_reward = sum(sum(group.rewards) for group in groups) / len(batch.tokens)
            yield mean_reward, policy.publish(engine).digest


if __name__ == "__main__":
    print(*train(int(sys.argv[1])), sep="\n")
