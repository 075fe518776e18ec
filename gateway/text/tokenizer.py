"""The gateway's part of the model: its tokenizer, chat template and limits, read once from the checkpoint folder.

Only the `tokenizers` library and the folder's files are used: no torch, no transformers, no network. All methods are
pure functions of the files, so several threads may tokenize at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from disagg.gateway.text import checkpoint
from disagg.gateway.text.chat_template import NO_OPTIONS, ChatTemplate, ChatTurn, TemplateOptions
from disagg.gateway.text.literal_text import LiteralText
from disagg.gateway.text.pooling import RERANK_TEMPLATE, PoolingInfo, read_pooling
from disagg.gateway.text.reasoning import TAGS, ReasoningFormat
from disagg.gateway.text.token_pieces import TokenPieces, byte_alphabet
from disagg.gateway.text.tool_calls import ToolFormat
from disagg.proto.errors import ConfigError, ContextLengthError, InvalidRequestError

ToolParserName = Literal["auto"] | ToolFormat
ReasoningParserName = Literal["auto"] | ReasoningFormat
FAKE_MODEL_PATH = "fake"
FAKE_VOCAB_SIZE = 32_000
FAKE_MAX_MODEL_LEN = 8192
_FIRST_PREFIX_BYTES_PER_TOKEN = 8
"""Text with more bytes for each token of the limit is tokenized in prefixes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What requests are checked against."""

    name: str
    vocab_size: int
    """Rows of the model's embedding (`config.json`); a tokenizer may have fewer or more ids."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    eos_token_ids: tuple[int, ...]
    pooling: PoolingInfo | None = None
    """Set for a model that gives vectors or scores, and no answers."""

    @property
    def longest_prompt(self) -> int:
        """Longest prompt in tokens: an answer has at least one."""
        return self.max_model_len - (self.pooling is None)


class Tokenizer:
    """Text to ids and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        *,
        special_tokens_in_chat: bool = False,
        nonce: str = "",
        tool_parser: ToolParserName = "auto",
        reasoning_parser: ReasoningParserName = "auto",
        has_answers: bool = True,
    ) -> None:
        # A tokenizer.json may carry the truncation and padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._template = template
        self._answer_tokens = int(has_answers)
        """Tokens of the context that no prompt has."""
        self.tool_format: ToolFormat = "hermes" if template is None else template.tool_format
        """How the model writes calls of tools."""
        if tool_parser != "auto":
            self.tool_format = tool_parser
        self.reasoning_format: ReasoningFormat = "none" if template is None else template.reasoning_format
        """How the model separates its reasoning from its answer."""
        if reasoning_parser != "auto":
            self.reasoning_format = reasoning_parser
        if self.reasoning_format == "think" and any(backend.token_to_id(tag) in self.special_token_ids for tag in TAGS):
            if reasoning_parser == "think":
                raise ConfigError("gateway.reasoning_parser: think: <think> is a special token, which no text shows")
            self.reasoning_format = "none"
        is_literal = template is not None and self.special_token_ids and not special_tokens_in_chat
        self._literal = LiteralText(backend, nonce) if is_literal else None
        mask = backend.encode("a").special_tokens_mask
        self.first_ids = tuple(backend.encode("a").ids[: mask.index(0) if 0 in mask else 0])
        """What the post-processor puts before a text."""
        self._pieces = TokenPieces(backend)
        self.max_bytes_per_token = self._pieces.max_bytes_per_token()
        """No token stands for more bytes of text; `None` where the tokenizer sets no such limit."""

    def encode_text(self, text: str, special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of `text`, with the special tokens that the model's post-processor adds unless `special` is false.
        Special tokens that are spelled out in the text become their ids.

        Args:
            max_tokens: of a prompt: one less than the context has, but for a model without answers.

        Raises:
            ContextLengthError: naming `prompt.text`, where it is soon seen that there are more than `max_tokens`.
        """
        self._check_length("prompt.text", text, max_tokens)
        return self._encode(text, special, "prompt.text", max_tokens)

    def encode_chat(
        self,
        turns: Sequence[ChatTurn],
        max_tokens: int | None = None,
        tools: str = "",
        options: TemplateOptions = NO_OPTIONS,
    ) -> list[int]:
        """Ids of a rendered conversation. The template writes its special tokens itself, so none are added. Special
        tokens that are spelled out in a content stay text, unless the tokenizer was made to read them.

        Raises:
            InvalidRequestError: if the model has no template or the template refuses the turns.
            ContextLengthError: as `encode_text`, naming `chat.messages`.
        """
        if self._template is None:
            raise InvalidRequestError("chat", "this model has no chat template; send text or token ids")
        given = [*turns, ChatTurn("system", tools, options.variables)]
        marked = None if self._literal is None else self._literal.protect(given)
        *marked_turns, others = marked or given
        text = self._template.render(marked_turns, others.content, options._replace(variables=others.extra))
        if self._literal is None or marked is None:
            self._check_length("chat.messages", text, max_tokens)
            return self._encode(text, False, "chat.messages", max_tokens)
        self._check_length("chat.messages", self._literal.restore(text), max_tokens)
        return self._literal.encode(text)

    def check_num_bytes(self, field: str, num_bytes: int, max_tokens: int) -> None:
        """Raises `ContextLengthError` naming `field` if text of this size is always more than `max_tokens`."""
        if self.max_bytes_per_token is not None and num_bytes > max_tokens * self.max_bytes_per_token:
            raise ContextLengthError.too_long(
                field,
                max_tokens + self._answer_tokens,
                f"the prompt has {num_bytes} bytes, which are more than {max_tokens} tokens",
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, without special tokens."""
        # As in `_encode`, the batch call lets other threads run.
        return str(self.backend.decode_batch([token_ids], skip_special_tokens=True)[0])

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be a part of a character. Special tokens are their own names; an id
        without a token is nothing."""
        return self._pieces.bytes_of(token_id)

    def _check_length(self, field: str, text: str, max_tokens: int | None) -> None:
        """Raises `ContextLengthError` if `text` is more than `max_tokens`, where a part of the work shows it.

        Tokens of a text are not those of its parts: how a cut part ends depends on what follows. So text is always
        tokenized whole, and a prefix only serves to refuse: one that has more than twice the tokens of the limit.
        """
        if max_tokens is None:
            return
        self.check_num_bytes(field, len(text.encode()), max_tokens)
        num_chars = _FIRST_PREFIX_BYTES_PER_TOKEN * (max_tokens + 1)
        while num_chars < len(text):
            if self._num_tokens(text[:num_chars]) > 2 * max_tokens:
                raise ContextLengthError.too_long(
                    field,
                    max_tokens + self._answer_tokens,
                    f"the first {num_chars} of {len(text)} characters are more than {2 * max_tokens} tokens",
                )
            num_chars *= 4

    def _num_tokens(self, text: str) -> int:
        return len(self.backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def _encode(self, text: str, special: bool, field: str, max_tokens: int | None) -> list[int]:
        # Only the batch calls of the library release the interpreter's lock: with `encode`, a megabyte of text on a
        # thread would stop the event loop for half a second. To make the list of the ids takes the lock again, so it is
        # not made of what is refused.
        encoding = self.backend.encode_batch_fast([text], add_special_tokens=special)[0]
        if max_tokens is not None and len(encoding) > 2 * max_tokens:
            raise ContextLengthError.too_long(
                field,
                max_tokens + self._answer_tokens,
                f"the prompt is too long: {len(encoding)} tokens > {max_tokens} maximum",
            )
        return list(encoding.ids)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this gateway serves."""

    info: ModelInfo
    tokenizer: Tokenizer
    chat_template: str | None = None
    """Source of the chat template; None where the model has none."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of the special tokens by name, such as `bos_token`."""


def load_model(
    path: str,
    name: str,
    max_model_len: int | None = None,
    *,
    special_tokens_in_chat: bool = False,
    nonce: str = "",
    tool_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> ServedModel:
    """Read a checkpoint folder.

    Args:
        path: the folder, or `fake` for the model without weights.
        name: what clients call the model.
        max_model_len: a limit in tokens below the checkpoint's own.
        special_tokens_in_chat: read special tokens that are spelled out in the contents of a chat.
        nonce: must not be guessable for authors of messages; see `LiteralText`.
        tool_parser, reasoning_parser: how answers are read, instead of what the chat template tells.

    Raises:
        ConfigError: if a file is missing or broken, or the limit exceeds the checkpoint's.
    """
    if path == FAKE_MODEL_PATH:
        return fake_model(name, max_model_len or FAKE_MAX_MODEL_LEN)
    folder = Path(path)
    config, backend = checkpoint.model_config(folder), _read_backend(folder / "tokenizer.json")
    pooling = read_pooling(folder, backend)
    info = ModelInfo(
        name=name,
        vocab_size=config.vocab_size or backend.get_vocab_size(),
        max_model_len=_model_len(folder, config, max_model_len, None if pooling is None else pooling.max_tokens),
        eos_token_ids=checkpoint.eos_ids(folder, config),
        pooling=pooling,
    )
    is_reranker = pooling is not None and pooling.kind == "score"
    source = RERANK_TEMPLATE if is_reranker else checkpoint.chat_template_source(folder)
    special_tokens = checkpoint.special_tokens(folder)
    template = None if source is None else ChatTemplate(source, special_tokens)
    tokenizer = Tokenizer(
        backend,
        template,
        special_tokens_in_chat=special_tokens_in_chat,
        nonce=nonce,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        has_answers=pooling is None,
    )
    return ServedModel(info, tokenizer, source, special_tokens)


def fake_model(name: str, max_model_len: int) -> ServedModel:
    """The tokenizer of the model without weights, which has no end of sequence. Ids below 256 are the bytes of UTF-8;
    those above, which only the model makes, read as ` t256`, ` t257` and so on."""
    pieces = [*byte_alphabet(), *(f"Ġt{token_id}" for token_id in range(256, FAKE_VOCAB_SIZE))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}assistant: "
    template = ChatTemplate(source, {})
    info = ModelInfo(name=name, vocab_size=FAKE_VOCAB_SIZE, max_model_len=max_model_len, eos_token_ids=())
    return ServedModel(info, Tokenizer(backend, template), source)


def _model_len(folder: Path, config: checkpoint.ModelConfig, wanted: int | None, most: int | None) -> int:
    """`most`: of a text that becomes a vector; None where that is as long as any."""
    own = config.max_position_embeddings
    if most is not None:
        own = most if own is None else min(own, most)
        wanted = None if wanted is None else min(wanted, own)
    if wanted is None and own is None:
        raise ConfigError(f"{folder / 'config.json'}: no max_position_embeddings; set max_model_len")
    if wanted is not None and own is not None and wanted > own:
        raise ConfigError(f"max_model_len: {wanted} is more than the {own} positions of {folder}")
    return wanted if wanted is not None else own or 0


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # the library raises bare `Exception` for every kind of broken file
        raise ConfigError(f"{path}: not a tokenizer file: {error}") from error
