"""The vLLM host: the same greedy tokens as our own loop, under preemption and prompts read in pieces."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB
from proposals import propose_all
from vllm_world import CONFIGS, NEW_TOKENS, PROMPTS, TOKENIZER, World

from radq.decoding.generate import generate
from radq.errors import ContextLengthError, OptionError
from radq.guides.spec import load_guide

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: radq[vllm]"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="module", params=CONFIGS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Any]:
    """With so little room that long requests are preempted and, for one family, long prompts read in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        from radq.hosts.vllm import VllmEngine

        tight: dict[str, Any] = {"num_gpu_blocks_override": 6, "max_num_seqs": 6, "block_size": 32}
        tight["gpu_memory_utilization"] = 0.2  # of main memory, on a CPU
        if world.base.name == "gpt2":
            tight |= {"max_num_batched_tokens": 12, "enable_chunked_prefill": True}
        with VllmEngine(world.base, world.guides, dtype="float32", enforce_eager=True, **tight) as engine:
            yield engine


def tokens(generations: list[Any]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def greedy(engine: Any, guide: str | None, **options: Any) -> list[list[int]]:
    fixed = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "top_k": 6, "stop_token_ids": [], "kl_budget": None}
    options = {**fixed, **options}
    return tokens(engine.generate(PROMPTS, guide, **options))


@pytest.mark.parametrize("kind", [None, "q", "v", "last", "layers"])
def test_greedy_tokens_are_those_of_our_own_loop(kind: str | None, world: World, engine: Any) -> None:
    expected = world.own(kind and world.guides[kind])
    assert greedy(engine, kind) == expected
    assert greedy(engine, kind, samples=3) == [row for row in expected for _ in range(3)]
    assert engine.tokens_per_second > 0
    if kind is not None:
        assert expected != world.own(None)
        options: dict[str, Any] = {"top_k": 9, "top_p": 0.8, "kl_budget": 0.5}
        assert greedy(engine, kind, **options) == world.own(world.guides[kind], **options)


def test_requests_of_one_batch_keep_their_own_guide_and_beta(world: World, engine: Any) -> None:
    from vllm import SamplingParams

    folder = world.guides["nice"].rpartition(":")[0]
    wishes = {
        None: {},
        world.guides["q"]: {"radq": {"q.0": 4, "q.1": -6, "kl_budget": None}},
        world.guides["v"]: {"radq": "v.0,v.1,kl_budget=none"},
        f"{folder}:nice=-7": {"radq_guide": "nice", "radq_beta": -7, "radq_kl_budget": "none"},
        f"{folder}:nice=9.5": {"radq_guide": "nice", "radq_beta": [9.5], "radq_kl_budget": None},
    }
    pairs = [(prompt, guide) for prompt in PROMPTS for guide in wishes]
    outputs = engine.llm.generate(
        [{"prompt_token_ids": TOKENIZER(prompt).input_ids} for prompt, _ in pairs],
        [
            SamplingParams(
                temperature=0,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                detokenize=False,
                extra_args=wishes[guide] and {"radq_top_k": 6, **wishes[guide]},
            )
            for _, guide in pairs
        ],
        use_tqdm=False,
    )
    expected = {guide: dict(zip(PROMPTS, world.own(guide), strict=True)) for guide in wishes}
    for (prompt, guide), output in zip(pairs, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected[guide][prompt]
    assert len({str(found) for found in expected.values()}) == len(wishes)


def test_readouts_read_nothing_themselves(world: World, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own states are enough: the base model that a readout would read by itself is never called.

    vLLM's GPT-2 does not give the outputs of earlier layers.
    """
    from radq.hosts.vllm import PROCESSORS

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the base model was read a second time")

    for processor in PROCESSORS:
        for guide in processor.steerer.loaded.guides:
            if guide.model.readout is not None:
                monkeypatch.setattr(guide.model.backbone, "forward", refuse)
    before = sum(processor.steerer.figures.totals["failed"] for processor in PROCESSORS)
    for kind in ("last",) if world.base.name == "gpt2" else ("last", "layers"):
        assert greedy(engine, kind) == world.own(world.guides[kind])
    assert sum(processor.steerer.figures.totals["failed"] for processor in PROCESSORS) == before


def test_texts_end_at_stop_tokens(world: World, engine: Any) -> None:
    for kind in (None, "q"):
        generations = engine.generate(PROMPTS, kind, temperature=0, max_new_tokens=NEW_TOKENS, top_k=6)
        loaded = None if kind is None else load_guide(world.guides[kind])
        own = generate(world.lm, TOKENIZER, PROMPTS, loaded, temperature=0, max_new_tokens=NEW_TOKENS, top_k=6)
        for generation, expected in zip(generations, own, strict=True):
            assert (generation.prompt, generation.text) == (expected.prompt, expected.text)
            assert (generation.token_ids, generation.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_an_empty_prompt_begins_with_bos(world: World, engine: Any) -> None:
    found = engine.generate([""], "q", temperature=0, top_k=6, max_new_tokens=8, stop_token_ids=[], kl_budget=None)
    assert tokens(found) == world.own(world.guides["q"], [""], max_new_tokens=8)


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_samples_depend_on_seed_prompt_and_number_alone(engine: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 2.0, "top_k": None, "stop_token_ids": []}
    both = tokens(engine.generate(PROMPTS[:2], "q", samples=3, seed=5, **options))
    assert tokens(engine.generate(PROMPTS[:2], "q", samples=3, seed=5, **options)) == both
    assert tokens(engine.generate(PROMPTS[:1], "q", samples=2, seed=5, **options)) == both[:2]
    assert tokens(engine.generate(PROMPTS[:2], "q", samples=3, seed=6, **options)) != both
    assert both[0] != both[1]


@pytest.mark.parametrize("world", ["llama"], indirect=True)
def test_temperature_divides_the_base_alone(world: World, engine: Any) -> None:
    """The first token of many samples, against the distribution of the formula."""
    from radq.decoding.steering import Steering

    guide = load_guide(f"{world.guides['nice'].rpartition(':')[0]}:nice=2")
    steering = Steering(6, temperature=2.0, kl_budget=None)
    ids = torch.tensor([TOKENIZER(PROMPTS[0]).input_ids])
    with torch.no_grad():
        logits = world.lm(input_ids=ids).logits[:, -1]
    proposal = propose_all(logits, guide, guide.start(ids), steering)
    expected = torch.zeros(VOCAB, dtype=torch.float64).scatter(
        0, proposal.candidates[0], proposal.logits[0].double().softmax(0)
    )
    count = 600
    options: dict[str, Any] = {"top_k": 6, "temperature": 2.0, "kl_budget": None, "stop_token_ids": []}
    found = engine.generate(PROMPTS[:1], "nice", 2.0, max_new_tokens=1, samples=count, **options)
    shares = torch.bincount(torch.tensor([row[0] for row in tokens(found)]), minlength=VOCAB) / count
    assert (shares - expected).abs().max() < 4 * 0.5 / count**0.5  # four standard deviations


def test_mistakes_are_refused_before_anything_runs(engine: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(OptionError, match="there is no guide 'toxicity'. hint: the guides are q, v, nice"):
        engine.generate(PROMPTS, "toxicity")
    with pytest.raises(OptionError, match="one number for each strength"):
        engine.generate(PROMPTS, "q", 3.0)  # has two
    with pytest.raises(OptionError, match="temperature must be in"):
        engine.generate(PROMPTS, temperature=5.0)
    with pytest.raises(OptionError, match="samples must be at least 1"):
        engine.generate(PROMPTS, samples=0)
    with pytest.raises(ContextLengthError, match="prompt 0 has 5 tokens"):
        engine.generate(PROMPTS, "q", max_new_tokens=60)
    for name in ("toxicity", "/etc:nice=1"):
        params = SamplingParams(extra_args={"radq_guide": name})  # past the engine, as over HTTP
        with pytest.raises(VLLMValidationError, match="guides are q.0, q.1, v.0, v.1, nice"):
            engine.llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
    assert greedy(engine, None)  # and it still runs


# --- the processor itself ---


def make_config(world: World, max_model_len: int = 63, **model: Any) -> Any:
    options = {"enable_prompt_embeds": False, "max_model_len": max_model_len, "get_vocab_size": lambda: VOCAB}
    options |= {"quantization": None, **model}
    names = {"tokenizer": str(world.base), "model": str(world.base), "logprobs_mode": "raw_logprobs"}
    return SimpleNamespace(
        speculative_config=None,
        lora_config=None,
        model_config=SimpleNamespace(**names, **options),
        scheduler_config=SimpleNamespace(max_num_seqs=5),
        cache_config=SimpleNamespace(cpu_kvcache_space_bytes=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, enable_batch_sharded_sampling=False),
    )


@pytest.fixture
def registry(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    from radq.hosts.vllm import split_guides

    guides = {
        name: guide for name, guide in world.guides.items() if name not in ("last", "layers")
    }  # which read a real vLLM
    entries = {name: entry for parts in split_guides(guides).values() for name, entry in parts.items()}
    (tmp_path / "guides.yaml").write_text(json.dumps(entries))  # which is YAML, too
    monkeypatch.setenv("RADQ_GUIDES", str(tmp_path / "guides.yaml"))
    return world


def test_what_cannot_work_fails_at_the_start(registry: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from radq.hosts.vllm import GuidedProcessor

    cpu = torch.device("cpu")
    with pytest.raises(ContextLengthError, match="smaller max_model_len"):
        GuidedProcessor(make_config(registry, 64), cpu, False)
    with pytest.raises(OptionError, match="embeddings"):
        GuidedProcessor(make_config(registry, enable_prompt_embeds=True), cpu, False)
    speculating = make_config(registry)
    speculating.speculative_config = object()
    with pytest.raises(OptionError, match="speculat"):
        GuidedProcessor(speculating, cpu, False)
    monkeypatch.delenv("RADQ_GUIDES")
    with pytest.raises(OptionError, match="RADQ_GUIDES is not set"):
        GuidedProcessor(make_config(registry), cpu, False)


def test_a_token_that_all_ranks_draw_is_counted_once(registry: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under tensor parallelism; not if each rank draws the tokens of its own requests."""
    import radq.hosts.vllm
    import radq.hosts.vllm_worker
    from radq.hosts.vllm_worker import GuideWorker

    def count(rank: int, shared_out: bool) -> list[Any]:
        config = make_config(registry)
        config.parallel_config = SimpleNamespace(tensor_parallel_size=2, enable_batch_sharded_sampling=shared_out)
        monkeypatch.setattr(radq.hosts.vllm.parallel_state, "get_tensor_model_parallel_rank", lambda: rank)
        processor = radq.hosts.vllm.GuidedProcessor(config, torch.device("cpu"), False)
        monkeypatch.setattr(radq.hosts.vllm_worker, "PROCESSORS", [processor])
        processor.steerer.figures.count(["ticket"], torch.tensor([[3.0, 0.5, 0.0, 0.0]]))
        worker = GuideWorker()
        return [worker.radq_totals()["tokens"], worker.radq_take("ticket"), processor.steerer.figures.take("ticket")]

    sums = {"tokens": 3.0, "kl": 0.5, "clipped": 0.0, "failed": 0.0}
    assert count(0, shared_out=False) == [3.0, sums, None]
    assert count(1, shared_out=False) == [0.0, None, None]
    assert count(1, shared_out=True) == [3.0, sums, None]


def test_slots_follow_the_order_of_changes(registry: World) -> None:
    """Those of vLLM's first runner, which frees, takes, moves and swaps rows of its batch."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from radq.hosts.vllm import GuidedProcessor

    processor: Any = GuidedProcessor(make_config(registry), torch.device("cpu"), False)
    one_way, swap = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP

    def change(removed: list[int], added: dict[int, str], moved: list[Any]) -> dict[int, str]:
        """Change requests with prompts of one letter, of which capital ones are not guided; return those that are."""
        params = [SamplingParams(extra_args=None if name.isupper() else {"radq": "q.0"}) for name in added.values()]
        texts = [(slot, one, [ord(name)], []) for one, (slot, name) in zip(params, added.items(), strict=True)]
        processor.update_state(BatchUpdate(batch_size=6, removed=removed, added=texts, moved=moved))
        return {slot: chr(request.prompt[0]) for slot, request in processor._requests.items()}

    assert change([], {0: "a", 1: "X", 2: "b"}, []) == {0: "a", 2: "b"}
    assert change([], {0: "c", 3: "d"}, [(3, 1, one_way), (0, 2, swap)]) == {0: "b", 1: "d", 2: "c"}  # taken, moved
    assert change([2], {}, [(1, 0, one_way)]) == {0: "d"}  # freed, and replaced by a move
    assert change([], {}, [(5, 0, swap)]) == {5: "d"}  # swapped with an unguided one
    assert change([], {}, [(4, 5, one_way)]) == {}  # an unguided one takes the place
    assert change([], {1: "e"}, []) == {1: "e"}
    assert change([], {1: "Y"}, []) == {}  # replaced by an unguided one


class SecondRunner:
    """What vLLM's second model runner shows a processor, step by step: slots that stay, rows that do not."""

    def __init__(self, config: Any, num_slots: int = 5):
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

        from radq.hosts.vllm import GuidedProcessor

        self.tokens = torch.zeros(num_slots, 64, dtype=torch.int32)
        self.prefill = np.zeros(num_slots, dtype=np.int32)
        states: Any = SimpleNamespace(
            device=torch.device("cpu"),
            all_token_ids=SimpleNamespace(gpu=self.tokens),
            prefill_len=SimpleNamespace(np=self.prefill),
        )
        self.processor: Any = GuidedProcessor(config, states)
        assert isinstance(self.processor, LogitsProcessor)
        self.lengths = [0] * num_slots

    def add(self, slot: int, text: list[int], guide: str | None) -> None:
        from vllm import SamplingParams

        arguments = None if guide is None else {"radq": f"{guide}.0,{guide}.1,kl_budget=none,top_k=6"}
        needed = self.processor.add_request(slot, SamplingParams(temperature=0, extra_args=arguments))
        assert needed == (guide is not None)
        self.processor.apply_staged_writes()
        self.tokens[slot, : len(text)] = torch.tensor(text)
        self.lengths[slot] = self.prefill[slot] = len(text)

    def step(self, world: World, slots: list[int], num_computed: dict[int, int] | None = None) -> None:
        """One token for each slot, rows in this order; a prompt read in part has none yet."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        lengths = [(num_computed or {}).get(slot, self.lengths[slot]) for slot in slots]
        texts = [self.tokens[slot, :length].tolist() for slot, length in zip(slots, lengths, strict=True)]
        with torch.no_grad():
            logits = torch.stack([world.lm(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
        rows = torch.tensor(slots)
        context = LogitsContext(
            expanded_idx_mapping=rows,
            idx_mapping=rows,
            idx_mapping_np=np.array(slots, dtype=np.int32),
            expanded_local_pos=torch.zeros_like(rows),
            input_ids=torch.tensor([text[-1] for text in texts]),
            pos=torch.tensor(lengths) - 1,
            seq_lens_upper_bound_np=np.array(lengths, dtype=np.int32),
        )
        chosen = self.processor.apply(logits, context).argmax(-1).tolist()
        for slot, token in zip(slots, chosen, strict=True):
            if slot not in (num_computed or {}):
                self.tokens[slot, self.lengths[slot]] = token
                self.lengths[slot] += 1

    def output(self, slot: int, prompt: list[int]) -> list[int]:
        return self.tokens[slot, len(prompt) : self.lengths[slot]].tolist()


@pytest.mark.parametrize("kind", ["q", "v"])
def test_the_second_runner_chooses_the_same_tokens(kind: str, registry: World) -> None:
    prompts = [TOKENIZER(prompt).input_ids for prompt in PROMPTS]
    guided, plain = registry.own(registry.guides[kind]), registry.own(None)
    runner = SecondRunner(make_config(registry))
    runner.add(3, prompts[0], kind)
    runner.add(0, prompts[1], None)
    runner.step(registry, [3, 0])
    runner.add(4, prompts[3], kind)
    runner.step(registry, [0, 4, 3], {4: 6})  # the prompt of 4 is read in two pieces
    runner.step(registry, [4, 3, 0])
    runner.step(registry, [4, 0])  # 3 waits
    runner.step(registry, [3, 4, 0])
    assert runner.output(3, prompts[0]) == guided[0][:4]
    assert runner.output(0, prompts[1]) == plain[1][:5]
    assert runner.output(4, prompts[3]) == guided[3][:3]
    runner.add(0, prompts[2], kind)  # the slot's earlier text has ended
    runner.add(1, runner.tokens[4, : runner.lengths[4]].tolist(), kind)  # 4 was preempted, and comes back as 1
    for slots in ([0, 1], [1, 0], [0, 1]):
        runner.step(registry, slots)
    assert runner.output(0, prompts[2]) == guided[2][:3]
    assert runner.output(1, prompts[3]) == guided[3][:6]


def test_a_sweep_runs_in_it_and_resumes(
    world: World, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine that is running: a second one would not fit beside it."""
    import radq.hosts.vllm
    from radq.evaluation.sweep.config import GuideSweep, PromptFile, Sweep
    from radq.evaluation.sweep.folder import open_sweep
    from radq.evaluation.sweep.generate import generate_all
    from radq.files import read_lines

    monkeypatch.setattr(radq.hosts.vllm, "VllmEngine", lambda base, guides, **options: engine)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    folder = world.guides["nice"].partition(":")[0]
    sweep = Sweep(
        str(world.base),
        [PromptFile(str(tmp_path / "prompts.txt"))],
        {"nice": GuideSweep(folder, {"nice": 2.0}, beta=[0.5, 3.0])},
        metrics=[],
        samples=2,
        max_new_tokens=6,
        top_k=[6],
        kl_budget=[None],
        temperature=0.0,
        batch_size=1,
        engine="vllm",
    )
    prompts = sweep.read_prompts()

    def run() -> bytes:
        with open_sweep(tmp_path / "run", sweep, prompts):
            generate_all(tmp_path / "run", sweep, prompts, "cpu")
        return (tmp_path / "run/generations.jsonl").read_bytes()

    whole = run()
    rows = {
        (row["cell"], row["prompt"]): row["continuations"] for row in read_lines(tmp_path / "run/generations.jsonl")
    }
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "top_k": 6, "kl_budget": None}
    expected = generate(world.lm, TOKENIZER, PROMPTS, load_guide(f"{folder}:nice=6"), **options)
    assert [rows["nice β=3 k=6 seed=0", n] for n in range(4)] == [[g.text] * 2 for g in expected]
    (tmp_path / "run/generations.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run() == whole
