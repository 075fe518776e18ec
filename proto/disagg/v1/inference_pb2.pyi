from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CONTENT_FILTER: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CONTENT_FILTER: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "stopping", "n", "cache_salt", "resume", "structured", "truncate_prompt_tokens", "split_reasoning", "speculation", "session_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_REASONING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    sampling: SamplingParams
    stopping: StopConditions
    n: int
    cache_salt: str
    resume: Resume
    structured: StructuredOutput
    truncate_prompt_tokens: int
    split_reasoning: bool
    speculation: str
    session_id: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StopConditions, _Mapping]] = ..., n: _Optional[int] = ..., cache_salt: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ..., truncate_prompt_tokens: _Optional[int] = ..., split_reasoning: bool = ..., speculation: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "choice", "grammar")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    choice: Choices
    grammar: str
    def __init__(self, json_object: bool = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token_ids", "model_version")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    model_version: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., model_version: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "finished")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    finished: Finished
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("first_index", "token_ids", "text", "logprobs", "answer_index", "model_version", "reasoning")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    answer_index: int
    model_version: str
    reasoning: str
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., answer_index: _Optional[int] = ..., model_version: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage", "request_id", "answer_index")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_INDEX_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    request_id: str
    answer_index: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., request_id: _Optional[str] = ..., answer_index: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class GenerateOnceRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class GenerateOnceResponse(_message.Message):
    __slots__ = ("text", "token_ids", "finished", "logprobs", "reasoning")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: Finished
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    reasoning: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_model_len", "vocab_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    vocab_size: int
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatMessages
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetClusterStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterStateResponse(_message.Message):
    __slots__ = ("workers", "queued_requests", "running_requests", "pools", "stages", "slos", "transfers", "requests_per_s", "output_tokens_per_s", "http_address", "autoscaler", "generation", "rollout", "rolled_back", "gateways", "gateway_start_phases", "notes", "load_left_out")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SLOS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUTOSCALER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_START_PHASES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    queued_requests: int
    running_requests: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolState]
    stages: _containers.RepeatedCompositeFieldContainer[StageCount]
    slos: _containers.RepeatedCompositeFieldContainer[SloState]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferState]
    requests_per_s: float
    output_tokens_per_s: float
    http_address: str
    autoscaler: AutoscalerState
    generation: int
    rollout: RolloutState
    rolled_back: RolledBack
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayState]
    gateway_start_phases: _containers.RepeatedCompositeFieldContainer[StartPhase]
    notes: _containers.RepeatedScalarFieldContainer[str]
    load_left_out: bool
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolState, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[StageCount, _Mapping]]] = ..., slos: _Optional[_Iterable[_Union[SloState, _Mapping]]] = ..., transfers: _Optional[_Iterable[_Union[TransferState, _Mapping]]] = ..., requests_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ..., http_address: _Optional[str] = ..., autoscaler: _Optional[_Union[AutoscalerState, _Mapping]] = ..., generation: _Optional[int] = ..., rollout: _Optional[_Union[RolloutState, _Mapping]] = ..., rolled_back: _Optional[_Union[RolledBack, _Mapping]] = ..., gateways: _Optional[_Iterable[_Union[GatewayState, _Mapping]]] = ..., gateway_start_phases: _Optional[_Iterable[_Union[StartPhase, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., load_left_out: bool = ...) -> None: ...

class RolloutState(_message.Message):
    __slots__ = ("generation", "previous", "stage", "done", "total", "running_s", "doing", "next", "is_back", "why")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    IS_BACK_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    previous: int
    stage: str
    done: int
    total: int
    running_s: float
    doing: str
    next: str
    is_back: bool
    why: str
    def __init__(self, generation: _Optional[int] = ..., previous: _Optional[int] = ..., stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., running_s: _Optional[float] = ..., doing: _Optional[str] = ..., next: _Optional[str] = ..., is_back: bool = ..., why: _Optional[str] = ...) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("generation", "why")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    why: str
    def __init__(self, generation: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class GatewayState(_message.Message):
    __slots__ = ("name", "phase", "detail", "pid", "own_address", "own_http_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    OWN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OWN_HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    phase: str
    detail: str
    pid: int
    own_address: str
    own_http_address: str
    def __init__(self, name: _Optional[str] = ..., phase: _Optional[str] = ..., detail: _Optional[str] = ..., pid: _Optional[int] = ..., own_address: _Optional[str] = ..., own_http_address: _Optional[str] = ...) -> None: ...

class AutoscalerState(_message.Message):
    __slots__ = ("policy", "dry_run", "age_s", "pools", "requests_per_s", "forecast_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FORECAST_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    policy: str
    dry_run: bool
    age_s: float
    pools: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    requests_per_s: float
    forecast_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    def __init__(self, policy: _Optional[str] = ..., dry_run: bool = ..., age_s: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ..., requests_per_s: _Optional[float] = ..., forecast_per_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("pool", "size", "wanted", "reason", "change")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    size: int
    wanted: int
    reason: str
    change: str
    def __init__(self, pool: _Optional[str] = ..., size: _Optional[int] = ..., wanted: _Optional[int] = ..., reason: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class StageCount(_message.Message):
    __slots__ = ("stage", "requests")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    requests: int
    def __init__(self, stage: _Optional[str] = ..., requests: _Optional[int] = ...) -> None: ...

class SloState(_message.Message):
    __slots__ = ("slo", "met", "total")
    SLO_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    slo: str
    met: int
    total: int
    def __init__(self, slo: _Optional[str] = ..., met: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class TransferState(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "transport", "transfers", "bytes", "failures")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    transport: str
    transfers: int
    bytes: int
    failures: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., transport: _Optional[str] = ..., transfers: _Optional[int] = ..., bytes: _Optional[int] = ..., failures: _Optional[int] = ...) -> None: ...

class WatchClusterStateRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchClusterStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: GetClusterStateResponse
    def __init__(self, state: _Optional[_Union[GetClusterStateResponse, _Mapping]] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("name", "desired", "ready")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    name: str
    desired: int
    ready: int
    def __init__(self, name: _Optional[str] = ..., desired: _Optional[int] = ..., ready: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "roles", "address", "incarnation", "pid", "sequences", "kv_blocks_total", "kv_blocks_active", "kv_blocks_cached", "kv_blocks_reserved", "phase", "detail", "starts", "fingerprint", "start_phases", "tokens_per_step", "drafted_tokens", "accepted_tokens", "prompt_tokens", "loaded_tokens", "fetched_tokens", "tp", "pp", "ep")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    address: str
    incarnation: str
    pid: int
    sequences: int
    kv_blocks_total: int
    kv_blocks_active: int
    kv_blocks_cached: int
    kv_blocks_reserved: int
    phase: str
    detail: str
    starts: int
    fingerprint: str
    start_phases: _containers.RepeatedCompositeFieldContainer[StartPhase]
    tokens_per_step: float
    drafted_tokens: int
    accepted_tokens: int
    prompt_tokens: int
    loaded_tokens: int
    fetched_tokens: int
    tp: int
    pp: int
    ep: bool
    def __init__(self, worker_id: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., sequences: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_active: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., kv_blocks_reserved: _Optional[int] = ..., phase: _Optional[str] = ..., detail: _Optional[str] = ..., starts: _Optional[int] = ..., fingerprint: _Optional[str] = ..., start_phases: _Optional[_Iterable[_Union[StartPhase, _Mapping]]] = ..., tokens_per_step: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., ep: bool = ...) -> None: ...

class StartPhase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SetPoolSizesRequest(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, sizes: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("pool", "size")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    size: int
    def __init__(self, pool: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class SetPoolSizesResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolState]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolState, _Mapping]]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "deadline_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_s: float
    def __init__(self, worker_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ForgetTenantResponse(_message.Message):
    __slots__ = ("workers", "missed")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    missed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ..., missed: _Optional[_Iterable[str]] = ...) -> None: ...

class ApplyConfigRequest(_message.Message):
    __slots__ = ("config_json", "dry_run", "no_surge", "restart", "ready_timeout_s")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    NO_SURGE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    READY_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    config_json: bytes
    dry_run: bool
    no_surge: bool
    restart: bool
    ready_timeout_s: float
    def __init__(self, config_json: _Optional[bytes] = ..., dry_run: bool = ..., no_surge: bool = ..., restart: bool = ..., ready_timeout_s: _Optional[float] = ...) -> None: ...

class ApplyConfigResponse(_message.Message):
    __slots__ = ("generation", "changes", "pools")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    changes: _containers.RepeatedCompositeFieldContainer[FieldChange]
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[FieldChange, _Mapping]]] = ..., pools: _Optional[_Iterable[str]] = ...) -> None: ...

class FieldChange(_message.Message):
    __slots__ = ("field", "before", "after", "how", "detail")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    field: str
    before: str
    after: str
    how: str
    detail: str
    def __init__(self, field: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., how: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("request_id", "prefill_worker", "decode_worker", "transport", "kv_bytes", "prefill_cached_tokens", "decode_cached_tokens", "attempts", "stages", "outcome", "prompt_tokens", "completion_tokens", "chosen", "options", "policy", "spans", "max_itl_ms", "trace_parent", "arrived_at", "is_probe", "detail", "guardrails", "trial", "model", "drafted_tokens", "accepted_tokens", "ways", "fetched")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    IS_PROBE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GUARDRAILS_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill_worker: str
    decode_worker: str
    transport: str
    kv_bytes: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    attempts: int
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    chosen: PlacementOption
    options: _containers.RepeatedCompositeFieldContainer[PlacementOption]
    policy: str
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    max_itl_ms: float
    trace_parent: str
    arrived_at: float
    is_probe: bool
    detail: str
    guardrails: _containers.RepeatedCompositeFieldContainer[GuardrailDecision]
    trial: str
    model: str
    drafted_tokens: int
    accepted_tokens: int
    ways: _containers.RepeatedCompositeFieldContainer[PromptWay]
    fetched: FetchedKv
    def __init__(self, request_id: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., transport: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., outcome: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., chosen: _Optional[_Union[PlacementOption, _Mapping]] = ..., options: _Optional[_Iterable[_Union[PlacementOption, _Mapping]]] = ..., policy: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., max_itl_ms: _Optional[float] = ..., trace_parent: _Optional[str] = ..., arrived_at: _Optional[float] = ..., is_probe: bool = ..., detail: _Optional[str] = ..., guardrails: _Optional[_Iterable[_Union[GuardrailDecision, _Mapping]]] = ..., trial: _Optional[str] = ..., model: _Optional[str] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., ways: _Optional[_Iterable[_Union[PromptWay, _Mapping]]] = ..., fetched: _Optional[_Union[FetchedKv, _Mapping]] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "base")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    base: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., base: _Optional[str] = ...) -> None: ...

class AddAdapterResponse(_message.Message):
    __slots__ = ("adapter", "notes")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ("notes",)
    NOTES_FIELD_NUMBER: _ClassVar[int]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "base", "phase", "detail", "fingerprint", "bytes", "in_file")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FILE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    base: str
    phase: str
    detail: str
    fingerprint: str
    bytes: int
    in_file: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., base: _Optional[str] = ..., phase: _Optional[str] = ..., detail: _Optional[str] = ..., fingerprint: _Optional[str] = ..., bytes: _Optional[int] = ..., in_file: bool = ...) -> None: ...

class PromptWay(_message.Message):
    __slots__ = ("kind", "source", "tokens", "get_ms", "prefill_ms", "delay_ms", "chosen")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GET_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    tokens: int
    get_ms: float
    prefill_ms: float
    delay_ms: float
    chosen: bool
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., tokens: _Optional[int] = ..., get_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., delay_ms: _Optional[float] = ..., chosen: bool = ...) -> None: ...

class FetchedKv(_message.Message):
    __slots__ = ("source", "outcome", "tokens", "bytes", "ms")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    source: str
    outcome: str
    tokens: int
    bytes: int
    ms: float
    def __init__(self, source: _Optional[str] = ..., outcome: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., ms: _Optional[float] = ...) -> None: ...

class GuardrailDecision(_message.Message):
    __slots__ = ("guardrail", "rule", "subject", "action", "reason", "count")
    GUARDRAIL_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    guardrail: str
    rule: str
    subject: str
    action: str
    reason: str
    count: int
    def __init__(self, guardrail: _Optional[str] = ..., rule: _Optional[str] = ..., subject: _Optional[str] = ..., action: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class PlacementOption(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "cost", "missed_targets", "wait_ms", "prefill_ms", "transfer_ms", "decode_ms", "delay_ms", "barrier_ms", "ttft_ms", "tpot_ms", "adapter_ms")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    MISSED_TARGETS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    BARRIER_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    cost: float
    missed_targets: int
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    delay_ms: float
    barrier_ms: float
    ttft_ms: float
    tpot_ms: float
    adapter_ms: float
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., cost: _Optional[float] = ..., missed_targets: _Optional[int] = ..., wait_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., delay_ms: _Optional[float] = ..., barrier_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., adapter_ms: _Optional[float] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("stage", "worker", "start_ms", "end_ms")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    END_MS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    worker: str
    start_ms: float
    end_ms: float
    def __init__(self, stage: _Optional[str] = ..., worker: _Optional[str] = ..., start_ms: _Optional[float] = ..., end_ms: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ExplainRequestResponse]
    def __init__(self, requests: _Optional[_Iterable[_Union[ExplainRequestResponse, _Mapping]]] = ...) -> None: ...

class ProbePairRequest(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class ProbePairResponse(_message.Message):
    __slots__ = ("kv_bytes", "expected_bytes", "exposed_ms", "transport")
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    expected_bytes: int
    exposed_ms: float
    transport: str
    def __init__(self, kv_bytes: _Optional[int] = ..., expected_bytes: _Optional[int] = ..., exposed_ms: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "at_ms")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    at_ms: float
    def __init__(self, stage: _Optional[str] = ..., at_ms: _Optional[float] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("requests", "workers", "policy", "decodes", "admission", "link_latency_s", "link_byte_s", "now_s")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    LINK_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTE_S_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCapacity]
    policy: str
    decodes: str
    admission: bool
    link_latency_s: float
    link_byte_s: float
    now_s: float
    def __init__(self, requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerCapacity, _Mapping]]] = ..., policy: _Optional[str] = ..., decodes: _Optional[str] = ..., admission: bool = ..., link_latency_s: _Optional[float] = ..., link_byte_s: _Optional[float] = ..., now_s: _Optional[float] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("arrival_s", "prompt_tokens", "completion_tokens", "is_complete", "max_tokens", "ttft_slo_s", "tpot_slo_s", "prefix_marks", "met_targets")
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MARKS_FIELD_NUMBER: _ClassVar[int]
    MET_TARGETS_FIELD_NUMBER: _ClassVar[int]
    arrival_s: float
    prompt_tokens: int
    completion_tokens: int
    is_complete: bool
    max_tokens: int
    ttft_slo_s: float
    tpot_slo_s: float
    prefix_marks: _containers.RepeatedScalarFieldContainer[int]
    met_targets: bool
    def __init__(self, arrival_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., is_complete: bool = ..., max_tokens: _Optional[int] = ..., ttft_slo_s: _Optional[float] = ..., tpot_slo_s: _Optional[float] = ..., prefix_marks: _Optional[_Iterable[int]] = ..., met_targets: bool = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("worker_id", "kv_blocks", "block_size", "max_num_seqs", "token_budget", "max_model_len", "kv_bytes_per_token", "decode_reserve_tokens", "watermark_blocks", "scheduling", "max_itl_ms", "base_ms", "prefill_token_ms", "attended_ms", "decode_ms", "context_ms", "kv_windows", "experts_ms", "expert_share", "tiers", "fetches")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    MAX_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    BASE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_MS_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SHARE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    kv_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    max_model_len: int
    kv_bytes_per_token: int
    decode_reserve_tokens: int
    watermark_blocks: int
    scheduling: str
    max_itl_ms: float
    base_ms: float
    prefill_token_ms: float
    attended_ms: float
    decode_ms: float
    context_ms: float
    kv_windows: _containers.RepeatedCompositeFieldContainer[WindowKv]
    experts_ms: float
    expert_share: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierCapacity]
    fetches: bool
    def __init__(self, worker_id: _Optional[str] = ..., kv_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., token_budget: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., decode_reserve_tokens: _Optional[int] = ..., watermark_blocks: _Optional[int] = ..., scheduling: _Optional[str] = ..., max_itl_ms: _Optional[float] = ..., base_ms: _Optional[float] = ..., prefill_token_ms: _Optional[float] = ..., attended_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., context_ms: _Optional[float] = ..., kv_windows: _Optional[_Iterable[_Union[WindowKv, _Mapping]]] = ..., experts_ms: _Optional[float] = ..., expert_share: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierCapacity, _Mapping]]] = ..., fetches: bool = ...) -> None: ...

class TierCapacity(_message.Message):
    __slots__ = ("name", "bytes", "extent_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    extent_ms: float
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., extent_ms: _Optional[float] = ...) -> None: ...

class WindowKv(_message.Message):
    __slots__ = ("window", "bytes_per_token")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    window: int
    bytes_per_token: int
    def __init__(self, window: _Optional[int] = ..., bytes_per_token: _Optional[int] = ...) -> None: ...

class SetDecodesRequest(_message.Message):
    __slots__ = ("decodes", "comparison")
    DECODES_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    decodes: str
    comparison: ShapeComparison
    def __init__(self, decodes: _Optional[str] = ..., comparison: _Optional[_Union[ShapeComparison, _Mapping]] = ...) -> None: ...

class SetDecodesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShapeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShapeResponse(_message.Message):
    __slots__ = ("policy", "decodes", "since", "changed_by", "comparisons", "load_read", "targeted_requests")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_BY_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_READ_FIELD_NUMBER: _ClassVar[int]
    TARGETED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    decodes: str
    since: float
    changed_by: str
    comparisons: _containers.RepeatedCompositeFieldContainer[ShapeComparison]
    load_read: float
    targeted_requests: int
    def __init__(self, policy: _Optional[str] = ..., decodes: _Optional[str] = ..., since: _Optional[float] = ..., changed_by: _Optional[str] = ..., comparisons: _Optional[_Iterable[_Union[ShapeComparison, _Mapping]]] = ..., load_read: _Optional[float] = ..., targeted_requests: _Optional[int] = ...) -> None: ...

class ShapeComparison(_message.Message):
    __slots__ = ("at", "cause", "requests", "present", "chosen", "options", "difference", "error", "needed", "reason", "measured", "measured_requests")
    AT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    at: float
    cause: str
    requests: int
    present: str
    chosen: str
    options: _containers.RepeatedCompositeFieldContainer[ShapeOption]
    difference: float
    error: float
    needed: float
    reason: str
    measured: float
    measured_requests: int
    def __init__(self, at: _Optional[float] = ..., cause: _Optional[str] = ..., requests: _Optional[int] = ..., present: _Optional[str] = ..., chosen: _Optional[str] = ..., options: _Optional[_Iterable[_Union[ShapeOption, _Mapping]]] = ..., difference: _Optional[float] = ..., error: _Optional[float] = ..., needed: _Optional[float] = ..., reason: _Optional[str] = ..., measured: _Optional[float] = ..., measured_requests: _Optional[int] = ...) -> None: ...

class ShapeOption(_message.Message):
    __slots__ = ("decodes", "predictions")
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    decodes: str
    predictions: _containers.RepeatedCompositeFieldContainer[RatePrediction]
    def __init__(self, decodes: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[RatePrediction, _Mapping]]] = ...) -> None: ...

class RatePrediction(_message.Message):
    __slots__ = ("rate_factor", "attainment")
    RATE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    rate_factor: float
    attainment: float
    def __init__(self, rate_factor: _Optional[float] = ..., attainment: _Optional[float] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("days", "key", "limit")
    DAYS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    days: int
    key: str
    limit: int
    def __init__(self, days: _Optional[int] = ..., key: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("entries", "first_date", "last_date", "has_more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DATE_FIELD_NUMBER: _ClassVar[int]
    LAST_DATE_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[KeyUsage]
    first_date: str
    last_date: str
    has_more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[KeyUsage, _Mapping]]] = ..., first_date: _Optional[str] = ..., last_date: _Optional[str] = ..., has_more: bool = ...) -> None: ...

class KeyUsage(_message.Message):
    __slots__ = ("date", "key", "model", "requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
    DATE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    date: str
    key: str
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, date: _Optional[str] = ..., key: _Optional[str] = ..., model: _Optional[str] = ..., requests: _Optional[int] = ..., failed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...
