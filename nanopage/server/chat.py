"""POST /v1/chat/completions."""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from nanopage.grammar.tool_pieces import Call, Content, Piece, Reasoning, Reply
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.errors import ApiError
from nanopage.server.generation import Change, Generation, changes, read_search, start, usage
from nanopage.server.images import load_images, text_of
from nanopage.server.logprobs import chat_logprobs, prompt_logprobs
from nanopage.server.protocol import ChatBody
from nanopage.server.state import ServerState
from nanopage.server.templates import chat_prompt
from nanopage.server.tools import ToolUse, find_wrong_tool, is_special, read_tool_use
from nanopage.text.reasoning import END_THINK, THINK


class Chat:
    """One call: its choices as a reply or as chunks.

    Args: state: the server's, with its engine.
    Raises: ApiError for fields that are out of range or contradict each other.
    """

    def __init__(self, state: ServerState, body: ChatBody):
        body.check()
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        llm, self.model = state.require(), state.model_name(body.model)
        self.llm, self.body, self.options = llm, body, state.tool_options
        self.adapter = state.adapters.requests.get(self.model)
        self.use: ToolUse = read_tool_use(llm, body, self.options)
        # The conversation and the tools, roughly, to estimate the length of the prompt.
        self.prompts = ["".join([*text_of(body.messages), *(str(tool.describe()) for tool in self.use.offered)])]
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.num_top = body.top_logprobs or 0
        logprobs = self.num_top if body.logprobs else None
        default, tokenizer = llm.engine.default_sampling_params, llm.engine.tokenizer
        self.params = body.sampling_params(default, None, logprobs, lambda form: self.use.constrain(form, tokenizer))
        self.params.stop_in_reasoning = body.stop_in_reasoning
        self.reads_calls = self.use.format is not None
        if logprobs is not None:
            tokens = min(self.params.max_tokens or llm.engine.max_model_len, llm.engine.max_model_len)
            body.check_logprobs(body.n, tokens, logprobs)
        self.search = read_search(body, self.params, llm.engine.max_model_len)
        self.copies = body.n // self.params.n if self.search is None else 1
        self.outputs: list[RequestOutput] = []  # the request's latest output
        self.reasoning: bool | None = None  # as in ReplyReader
        self.readers: dict[int, ReplyReader | None] = {}  # of each choice; of a whole reply, of each completion's first
        self.thought: dict[int, int] = {}  # tokens of each completion up to `</think>`, once that has come
        self.num_looked: defaultdict[int, int] = defaultdict(int)  # tokens of each in which `</think>` was looked for
        self.call_ids: defaultdict[tuple[int, int], str] = defaultdict(self._make_id)  # of (choice, call)

    def _make_id(self) -> str:
        assert self.use.format is not None
        return self.use.format.make_id()

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the conversation into the engine. Arguments and errors: as `generation.start`."""
        prompt = await self.make_prompt()
        self.reasoning, tokenizer = prompt["reasoning"], self.llm.engine.tokenizer
        marks = () if self.reasoning is None else (THINK, END_THINK)
        if self.reads_calls or any(is_special(tokenizer, mark) for mark in marks):
            self.params.skip_special_tokens = False  # special tokens are marks of calls or of reasoning
            if self.search is not None:
                self.search.skip_special_tokens = False
        try:
            return await start(self.llm, [prompt], self.search or self.params, self.body, entered, self.adapter)
        except ApiError as error:
            if self.reads_calls and (error.param or "").startswith(("structured_outputs", "response_format", "tools")):
                raise await self.llm.in_compiler(find_wrong_tool, self.llm, self.use.tools, error) from None
            raise

    async def make_prompt(self) -> dict:
        """The prompt, with its images. Raises: ApiError naming the field."""
        prompt = await self.llm.in_thread(chat_prompt, self.llm, self.body, self.use.offered)
        if self.body.prompt_logprobs is not None:
            tokens = len(prompt["prompt_token_ids"])
            self.body.check_logprobs(1, tokens, self.body.prompt_logprobs, "prompt_logprobs")
        await load_images(self.llm, prompt, self.body.messages)
        return prompt

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """All choices. Takes long if there are many log-probabilities."""
        self.outputs, choices = outputs, []
        for completion in self.outputs[0].outputs:
            of_tokens = self._of_tokens(completion, 0) | {"stop_reason": completion.stop_reason}
            whole, _ = self.read(completion)
            reason = self._finish_reason(completion, bool(whole.calls))
            for copy in range(self.copies):
                index = completion.index * self.copies + copy
                message = self._message(index, whole)
                choices.append({"index": index, "message": message, "finish_reason": reason} | of_tokens)
        return self._envelope("chat.completion", choices) | self._of_prompt() | {"usage": self.usage()}

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The choices as they grow: the role of each, the pieces of its reply, and how each has ended."""
        begun = False
        num_shown: dict[int, int] = {}  # tokens of each choice that have been sent
        async for change in changes(generation, self.params.n, self.copies):
            if not begun:
                begun, self.outputs = True, [replace(change.output, outputs=[])]  # these chunks have no tokens
                for index in range(self.body.n):
                    yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None}) | self._of_prompt()
            self.outputs = [change.output]
            of_tokens = self._of_tokens(change.completion, num_shown.get(change.index, 0))
            for piece in self.pieces(change):
                yield self._chunk(change.index, self._delta(change.index, piece), of_tokens)
                of_tokens, num_shown[change.index] = {}, len(change.completion.token_ids)
            if change.completion.finish_reason is not None:
                yield self._chunk(change.index, {}, of_tokens, change.completion)
        if self.body.wants_usage:
            yield self._envelope("chat.completion.chunk", []) | {"usage": self.usage()}

    def read(self, completion: CompletionOutput) -> tuple[Reply, list[Piece]]:
        """A completion as a whole reply, and its parts in order."""
        reader = self.readers[completion.index * self.copies] = self.use.make_reader(self.reasoning)
        if reader is None:
            return Reply(content=completion.text), [Content(completion.text)] if completion.text else []
        return reader.whole, reader.feed(completion.text) + reader.end()

    def pieces(self, change: Change) -> list[Piece]:
        """The new parts of a choice."""
        if change.index not in self.readers:
            self.readers[change.index] = self.use.make_reader(self.reasoning)
        reader = self.readers[change.index]
        if reader is None:
            return [Content(change.completion.delta)] if change.completion.delta else []
        pieces = reader.feed(change.completion.delta)
        return pieces if change.completion.finish_reason is None else pieces + reader.end()

    def _message(self, index: int, whole: Reply) -> dict:
        content = whole.content or (None if whole.calls else "")
        message: dict = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning:
            message |= {"reasoning": whole.reasoning, "reasoning_content": whole.reasoning}
        if whole.calls:
            calls = enumerate(whole.calls)
            message["tool_calls"] = [self._call(index, i, call.name, call.arguments) for i, call in calls]
        return message

    def _delta(self, index: int, piece: Piece) -> dict:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning": piece.text, "reasoning_content": piece.text}
        if isinstance(piece, Call):
            return {"tool_calls": [{"index": piece.index} | self._call(index, piece.index, piece.name, "")]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict:
        function = {"name": name, "arguments": arguments}
        return {"id": self.call_ids[index, number], "type": "function", "function": function}

    def _finish_reason(self, completion: CompletionOutput, has_calls: bool) -> str | None:
        if not has_calls or completion.finish_reason != "stop":
            return completion.finish_reason
        return self.options.named_finish_reason if self.use.choice.kind == "named" else "tool_calls"

    def _chunk(
        self, index: int, delta: dict, of_tokens: dict | None = None, ended: CompletionOutput | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (of_tokens or {})
        if ended is not None:
            reader = self.readers[index]
            reason = self._finish_reason(ended, reader is not None and bool(reader.whole.calls))
            choice |= {"finish_reason": reason, "stop_reason": ended.stop_reason}
        chunk = self._envelope("chat.completion.chunk", [choice])
        if self.body.wants_usage:
            chunk["usage"] = self.usage() if self.body.wants_usage_always else None
        return chunk

    def _envelope(self, kind: str, choices: list[dict]) -> dict:
        names = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return names | {"system_fingerprint": self.llm.system_fingerprint, "choices": choices}

    def usage(self) -> dict:
        """The tokens of the call so far."""
        counts = usage(self.outputs, self.copies)
        counts["completion_tokens_details"]["reasoning_tokens"] = self.num_reasoning_tokens() * self.copies
        return counts

    def num_reasoning_tokens(self) -> int:
        """The tokens of all completions up to `</think>`, if that is a single token."""
        if self.reasoning is None or self.llm.engine.tokenizer is None:
            return 0
        end = self.llm.engine.tokenizer.backend.token_to_id(END_THINK)
        return sum(self.count_thought(each, end) for output in self.outputs for each in output.outputs)

    def count_thought(self, completion: CompletionOutput, end_id: int | None) -> int:
        """The tokens of a completion's reasoning so far. Its text has been read.

        Args: end_id: the token `</think>`; None if that is several tokens.
        """
        index, ids = completion.index, completion.token_ids
        num_looked, self.num_looked[index] = self.num_looked[index], len(ids)  # every chunk may have usage
        if index not in self.thought and end_id in ids[num_looked:]:
            self.thought[index] = ids.index(end_id, num_looked) + 1
        reader = self.readers.get(index * self.copies)
        return self.thought.get(index, len(ids) if reader is not None and reader.whole.reasoning else 0)

    def _of_prompt(self) -> dict:
        """What a client has asked to see of the prompt's tokens."""
        output, count = self.outputs[0], self.body.prompt_logprobs
        found: dict = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
        if count is not None:
            found["prompt_logprobs"] = prompt_logprobs(output.prompt_token_ids, output.prompt_logprobs or [], count)
        return found

    def _of_tokens(self, completion: CompletionOutput, num_seen: int) -> dict:
        """What is shown of a choice's next tokens beside their text."""
        token_ids, tokenizer, body = completion.token_ids[num_seen:], self.llm.engine.tokenizer, self.body
        found: dict = {"logprobs": None} | ({"token_ids": token_ids} if body.return_token_ids else {})
        if completion.logprobs is not None and tokenizer is not None:
            tables, as_ids = completion.logprobs[num_seen:], body.return_tokens_as_token_ids
            found["logprobs"] = chat_logprobs(tokenizer, token_ids, tables, self.num_top, as_ids)
        return found
