"""The workload as TRL's `environment_factory` takes it: the action is a tool, said in a chat template.

The workload's words cannot say tool calls, so this arm has a tokenizer and a start model of its own: the same layers,
taught by the same expert until it calls the tool. Tokenizer and prompt are made as short as the template lets them be.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import workload
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_instruct_2507_chat_template, qwen3_instruct_2507_training_chat_template

from tiderl.data.records import Action, Prompt
from tiderl.data.rng import stream
from tiderl.envs.builtin import TRAIN_PROMPTS, Fetch

MAX_COMPLETION_TOKENS = 1024
"""Of all turns together: sixteen, with the template's words around calls and answers."""
MAX_NEW_TOKENS_PER_TURN = 32
"""A tool call and some room: it is longer than the workload's two words."""
MAX_POSITION_TOKENS = 2048
DEMOS, UPDATES, BATCH_DEMOS, LR = 200, 150, 16, 2.0e-3
"""As few as make the model call the tool nearly always."""
VOCABULARY = 600
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
OVER, DONE = "over", "done"
"""What the environment answers after its end, and what the policy says then, which ends the rollout."""


class FetchTools:
    """One rollout's environment. It is made once and reset often, as TRL does; the n-th made is the n-th of a batch."""

    def __init__(self, wait: str, prompts: Sequence[Prompt], place: int) -> None:
        self._wait, self._prompts, self._member = wait, prompts, place % workload.GROUP_SIZE
        self._number = self._turn = 0
        self._environment = Fetch()
        self._reward = 0.0
        self._over = False

    def reset(self, number: int, **_: Any) -> str:
        self._number, self._turn, self._reward, self._over = number, 0, 0.0, False
        return self._environment.reset(self._prompts[number])

    def act(self, action: str) -> str:
        """Act.

        Args:
            action: left, right, forward or take.
        """
        if self._over:
            return OVER
        time.sleep(workload.waited_s(self._wait, self._number, self._member, self._turn))
        self._turn += 1
        step = self._environment.step(Action(str(action)))
        self._reward += step.reward
        self._over = step.terminated or step.truncated
        return str(step.observation)

    def get_reward(self) -> float:
        return self._reward


def factory(wait: str, prompts: Sequence[Prompt]) -> Callable[[], FetchTools]:
    places = itertools.count()
    return lambda: FetchTools(wait, prompts, next(places))


def conversation(prompt: Prompt) -> list[dict[str, Any]]:
    """The expert's episode as messages, the end included."""
    environment = Fetch()
    actions = environment.expert(prompt)
    messages: list[dict[str, Any]] = [{"role": "user", "content": environment.reset(prompt)}]
    for action in actions:
        call = {"type": "function", "function": {"name": "act", "arguments": {"action": action}}}
        answer = str(environment.step(Action(action)).observation)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "act", "content": answer})
    return [*messages, {"role": "assistant", "content": DONE}]


def tool() -> Callable[..., str]:
    return FetchTools("0", (), 0).act


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """What a rollout begins with: tool description and first observation, as TRL renders it."""
    message = {"role": "user", "content": Fetch().reset(prompt)}
    ids = tokenizer.apply_chat_template([message], tools=[tool()], add_generation_prompt=True, return_dict=True)
    return len(ids["input_ids"])


def start_model(words_model: Path) -> Path:
    """The folder of the taught start model, beside `words_model` whose layers it has; made where it is missing."""
    folder = words_model.parent / "tools-model"
    if (folder / "config.json").is_file():
        return folder
    # The last of one pass over the task set: no short run comes to them.
    demos = [conversation(prompt) for prompt in workload.first_prompts(TRAIN_PROMPTS)[-DEMOS:]]
    tokenizer = _tokenizer(demos)
    sizes = json.loads((words_model / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(workload.SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **{name: sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
            **{name: sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")},
            vocab_size=len(tokenizer),
            max_position_embeddings=MAX_POSITION_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    _teach(model, tokenizer, demos)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)  # what the trainer will do
    return folder


def _tokenizer(demos: Sequence[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE learnt on the demonstrations themselves, template and tool description included."""
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    bare.chat_template = qwen3_instruct_2507_chat_template
    texts = [bare.apply_chat_template(demo, tools=[tool()], tokenize=False) for demo in demos]
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIALS, *MARKS],
        show_progress=False,
    )
    learnt.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=learnt,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = qwen3_instruct_2507_chat_template
    return fast


def _teach(model: Any, tokenizer: Any, demos: Sequence[list[dict[str, Any]]]) -> None:
    """Cross-entropy on what the assistant says, with the template's own marks of that."""
    rendered = [
        tokenizer.apply_chat_template(
            demo,
            tools=[tool()],
            chat_template=qwen3_instruct_2507_training_chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for demo in demos
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    draws = stream(workload.SEED, "tools")
    for update in range(UPDATES):
        chosen = [rendered[place] for place in draws.choice(len(rendered), BATCH_DEMOS, replace=False)]
        longest = max(len(one["input_ids"]) for one in chosen)
        ids = torch.full((BATCH_DEMOS, longest), tokenizer.pad_token_id)
        labels = torch.full((BATCH_DEMOS, longest), -100)
        for row, one in enumerate(chosen):
            tokens, said = torch.tensor(one["input_ids"]), torch.tensor(one["assistant_masks"], dtype=torch.bool)
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(said, tokens, -100)
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (update + 1) / 10, (UPDATES - update) / (UPDATES / 2))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.MAX_GRAD_NORM)
        optimizer.step()
    print(f"taught for {UPDATES} updates, cross-entropy {float(loss.detach()):.3f} at last", flush=True)
