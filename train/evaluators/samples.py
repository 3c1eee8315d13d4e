"""Text that a language model writes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from partitioning import TrainState
from train.decoding.sampling import check_sampling
from train.errors import ConfigError, check_counts
from train.evaluators.evaluator import EvaluatedRun, partition_scoring
from train.models.config import TransformerConfig
from train.models.decoding import generate
from train.objectives import NextToken, as_model
from train.processes.activity import calling_compiler, wait_for_devices

# From so many tokens on, a terminal shows how many there are.
WORTH_SHOWING = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Prints what a language model writes after some prompts.

    Attributes:
      prompts: the texts that the model continues.
      length: the number of tokens, including the prompt.
      temperature: the temperature of the softmax. 0 always takes the most likely token.
      top_k: only the `top_k` most likely tokens are sampled. 0 allows all.
      top_p: only the most likely tokens whose probabilities add up to `top_p` are sampled. 0 allows
        all.
      every: the number of steps between samples. 0 samples only at the end.
    """

    prompts: Sequence[str] = ('\n',)
    length: int = 256
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.0
    every: int = 0

    def __post_init__(self) -> None:
        check_counts(**{'Samples.length': self.length})
        texts = self.prompts
        if isinstance(texts, str) or not texts or not all(isinstance(p, str) for p in texts):
            raise ConfigError(f'Samples.prompts is {texts!r}: it must be a list of strings')
        try:
            check_sampling(self.temperature, self.top_k, self.top_p)
        except ConfigError as error:
            raise ConfigError(f'Samples.{error}') from error

    def prepare(self, run: EvaluatedRun, name: str) -> PreparedSamples:
        """Encodes the prompts.

        Raises:
          ConfigError: if the objective is not `NextToken`, if the data has no tokenizer, or if a
            prompt leaves no room for a continuation.
        """
        objective, tokenizer = run.config.objective, run.data.tokenizer
        if not isinstance(objective, NextToken) or tokenizer is None:
            raise ConfigError(
                f'the evaluator {name!r} samples text, which needs the objective NextToken and a '
                f'task on text, but the objective is {type(objective).__name__}: remove it'
            )
        encoded = list[np.ndarray]()
        for prompt in self.prompts:
            [tokens] = tokenizer.encode(['the prompt'], [prompt.encode()])
            tokens = tokens if len(tokens) else np.array([tokenizer.separator])
            if len(tokens) >= self.length:
                raise ConfigError(
                    f'the length of samples is {self.length}, but the prompt {prompt[:20]!r} '
                    f'already has {len(tokens)} tokens: use {len(tokens) + 1} or more'
                )
            encoded.append(tokens.astype(np.int32))
        return PreparedSamples(self.every, run, self, encoded)


@dataclasses.dataclass(frozen=True)
class PreparedSamples:
    """The tokens of each prompt, int32 [tokens]; see `Samples`.

    An empty prompt becomes the separator. `shown` is the function that shows the number of new
    tokens, while they are sampled.
    """

    every: int
    owner: EvaluatedRun
    settings: Samples
    prompts: list[np.ndarray]
    shown: list[Callable[[int], None]] = dataclasses.field(default_factory=list)

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        console = self.owner.console
        console.heading('samples: each prompt and its continuation')
        texts = self._continue(state)
        for prompt, text in zip(self.settings.prompts, texts, strict=True):
            console.sample(prompt, text)
        return {}

    def _continue(self, state: TrainState) -> list[str]:
        tokenizer, partitioner = self.owner.data.tokenizer, self.owner.config.partitioner
        assert tokenizer is not None
        # Repeats of the first prompt fill up the data shards.
        missing = -len(self.prompts) % partitioner.data_mesh_size
        prompts = [*self.prompts, *self.prompts[:1] * missing]
        sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        width = max(lengths_B)
        tokens_BP = np.stack([np.pad(prompt, (0, width - len(prompt))) for prompt in prompts])
        given = (
            jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
            for x in (tokens_BP, lengths_B)
        )
        console, new_tokens = self.owner.console, self.settings.length - min(map(len, self.prompts))
        with console.counting('generating tokens', new_tokens) as show:
            self.shown.append(show)
            with calling_compiler():
                tokens = self._sampler(state.params, state.flax_mutables, *given)
            rows = np.asarray(wait_for_devices(tokens))
            jax.effects_barrier()
        self.shown.clear()
        return [
            tokenizer.decode(row[len(prompt) : self.settings.length]).decode(errors='replace')
            for row, prompt in zip(rows, self.prompts, strict=False)
        ]

    def _show(self, number: Any) -> None:
        for show in self.shown:
            show(int(number))

    @functools.cached_property
    def _sampler(self) -> Any:
        """The function (params, variables, tokens, lengths) -> tokens. It is compiled once."""
        config, settings = self.owner.config, self.settings
        tokenizer, partitioner = self.owner.data.tokenizer, config.partitioner
        assert tokenizer is not None
        # A sample is one document. If the separator is the last token, it is never sampled.
        separator_is_last = tokenizer.separator == tokenizer.num_tokens - 1
        num_tokens = tokenizer.num_tokens - separator_is_last
        new_tokens = settings.length - min(map(len, self.prompts))
        module: Any = config.objective.model  # type: ignore[attr-defined]
        # A program that calls the host is not kept for the next start, so only a terminal has it.
        show_progress = self.owner.console.is_terminal and new_tokens >= WORTH_SHOWING
        is_built_in = isinstance(getattr(module, 'config', None), TransformerConfig)

        def continue_prompts(
            params: Any, variables: Any, tokens_BP: jax.Array, lengths_B: jax.Array
        ) -> jax.Array:
            def compute_logits(params: Any, tokens: jax.Array) -> jax.Array:
                applied = as_model(module).apply(
                    {'params': params, **(variables or {})}, None, tokens
                )
                return applied.outputs

            return generate(
                module if is_built_in else compute_logits,
                params,
                tokens_BP,
                lengths_B,
                jax.random.fold_in(jax.random.key(config.seed or 0), 1),
                new_tokens=new_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                num_tokens=num_tokens,
                on_tokens=self._show if show_progress else None,
            )[0]

        return partition_scoring(self.owner, continue_prompts, partitioner.data_partition_spec)
