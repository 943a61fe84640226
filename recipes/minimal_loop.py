"""RAD-Q training on one page: plain torch and a language model of transformers, no radq.

    python recipes/minimal_loop.py --data reviews.csv --text text --label label --backbone gpt2 --out praise.safetensors

A csv file holds texts, each with a label in [0, 1]. The model learns r̂(v | x): the label to expect if the text x
continues with the token v. One forward over x gives it for every v of the vocabulary:

    r̂(v | x) = ⟨h(x), w⟩ + ⟨h(x), W e(v)⟩        the baseline of the prefix plus the effect of the token

h(x) is the backbone's last hidden state, e(v) its output embedding. The file it writes is a state dict of
`RadQ.from_backbone("gpt2", ["label"])`. Axes: b batch, t time, d hidden, v vocabulary, a attributes (here 1).
"""

import argparse
import csv
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def make_batch(rows: list[tuple[list[int], float]], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pad texts, each with a BOS in front, on the right, where causal attention does not see the padding."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)  # (b, 1 + t)
    # The mask comes from lengths. Comparing ids with a padding id loses real tokens: for GPT-2 it is the end of text.
    lengths = torch.tensor([len(ids) - 1 for ids, _ in rows])  # (b,): the BOS is a prefix, and not scored itself
    mask = (torch.arange(tokens.shape[1] - 1) < lengths[:, None]).float()  # (b, t)
    labels = torch.tensor([label for _, label in rows])[:, None]  # (b, a)
    return tokens.to(device), mask.to(device), labels.to(device)


def predict(backbone: nn.Module, head: list[nn.Parameter], embedding: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards of a text's tokens, each from the prefix before it, and the effects of random tokens in their places."""
    texts = tokens[:, 1:]  # (b, t): u_1, u_2, …
    random_tokens = torch.randint_like(texts, len(embedding))  # (b, t): one per position, uniform
    hidden = backbone(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state  # (b, t, d): after BOS, u_1, …
    features = torch.einsum("btd,ade->btae", hidden, head[0])  # (b, t, a, d): Wᵀh, so that a token costs a dot product
    marginals, of_random = (torch.einsum("btad,btd->bta", features, embedding[v]) for v in (texts, random_tokens))
    return hidden @ head[1].T + marginals, of_random  # (b, t, a) both


def compute_loss(rewards: Tensor, of_random: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """λ-weighted squared errors plus a regulariser that pulls the effects of random tokens to 0."""
    weights = mask.cumsum(1) * mask  # (b, t): t at the t-th token, since early prefixes cannot know the label yet
    weights = weights / weights.sum(1, keepdim=True)  # λ_t = t / (1 + … + L)
    squared = ((rewards - labels[:, None]).square() * weights[..., None]).sum((1, 2)).mean()
    return squared + (of_random.square() * mask[..., None]).sum() / mask.sum()  # the regulariser has weight 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="csv file with texts and labels")
    parser.add_argument("--text", default="text", help="column with the texts")
    parser.add_argument("--label", default="label", help="column with the labels, numbers in [0, 1]")
    parser.add_argument("--backbone", default="gpt2", help="language model: a name on the hub or a folder")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=100, help="texts per step")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate at the start; it falls linearly to 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of head, order and random tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    # The model: the backbone trains without its embeddings, so that tokens absent from the data keep their place.
    lm = AutoModelForCausalLM.from_pretrained(args.backbone, dtype=torch.float32).to(args.device)
    lm.get_input_embeddings().requires_grad_(False)
    embedding = lm.get_output_embeddings().weight.requires_grad_(False)  # (v, d): in GPT-2 the input embedding
    backbone, d = lm.base_model, lm.config.hidden_size
    head = [nn.Parameter(torch.randn(shape, device=args.device) / d) for shape in ((1, d, d), (1, d))]  # W and w

    # The data: token ids and label of each text; every tenth text is held out.
    tokenizer = AutoTokenizer.from_pretrained(args.backbone)
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    longest = min(512, lm.config.max_position_embeddings - 1)
    with Path(args.data).open(newline="", encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row[args.text].strip()]
    ids = tokenizer([row[args.text].rstrip() for row in table], add_special_tokens=False).input_ids
    rows = [([bos, *text[:longest]], float(row[args.label])) for text, row in zip(ids, table, strict=True)]
    held_out, rows = rows[::10], [row for index, row in enumerate(rows) if index % 10]

    # The optimizer: matrices decay, biases and norms do not.
    trained = [p for p in backbone.parameters() if p.requires_grad] + head
    plain = {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0}
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01}
    optimizer = torch.optim.AdamW([plain, decayed], lr=args.lr, betas=(0.9, 0.95), eps=1e-12)
    steps = args.epochs * -(-len(rows) // args.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)

    for epoch in range(1, args.epochs + 1):
        lm.train()
        losses, errors = [], []
        for indices in torch.randperm(len(rows)).split(args.batch_size):
            tokens, mask, labels = make_batch([rows[i] for i in indices], args.device)
            loss = compute_loss(*predict(backbone, head, embedding, tokens), mask, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 2.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.detach())
        lm.eval()
        for first in range(0, len(held_out), args.batch_size):
            tokens, mask, labels = make_batch(held_out[first : first + args.batch_size], args.device)
            with torch.no_grad():
                rewards, _ = predict(backbone, head, embedding, tokens)
            last = (mask.sum(1).long() - 1)[:, None, None]  # (b, 1, 1): the last token has seen the whole text
            errors.append((rewards.take_along_dim(last, 1)[:, 0] - labels).square())  # (b, a)
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.6f}, last-token MSE {torch.cat(errors).mean():.6f}")

    tensors = {f"backbone.{name}": tensor for name, tensor in backbone.state_dict().items()}
    if embedding is not lm.get_input_embeddings().weight:  # as in LLaMA
        tensors["output_embedding.weight"] = embedding
    save_file(tensors | {"head.weight": head[0], "head.baseline_weight": head[1]}, args.out)


if __name__ == "__main__":
    main()
