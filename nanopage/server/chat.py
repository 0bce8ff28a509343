"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Callable

from nanopage.async_llm import AsyncLLM
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.choices import changes, usage
from nanopage.server.errors import ApiError
from nanopage.server.generation import Generation, start
from nanopage.server.logprobs import chat_logprobs
from nanopage.server.protocol import ChatBody
from nanopage.server.templates import chat_prompt


class Chat:
    """One call: its choices as a reply or as chunks.

    Args:
        model: the name the client knows the model by.

    Raises: ApiError for fields that are out of range or contradict each other.
    """

    def __init__(self, llm: AsyncLLM, body: ChatBody, model: str):
        body.check()
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        self.llm, self.body, self.model = llm, body, model
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.num_top = body.top_logprobs or 0
        logprobs = self.num_top if body.logprobs else None
        self.params = body.sampling_params(llm.engine.default_sampling_params, None, logprobs)
        if logprobs is not None:
            tokens = min(self.params.max_tokens or llm.engine.max_model_len, llm.engine.max_model_len)
            body.check_logprobs(body.n, tokens, logprobs)
        self.copies = body.n // self.params.n
        self.outputs: list[RequestOutput] = []  # the latest of the request

    @property
    def prompts(self) -> list[str]:
        """The conversation, roughly, to estimate its length."""
        return ["".join(str(message.get("content")) for message in self.body.messages)]

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the conversation into the engine. Arguments and errors are those of `generation.start`."""
        prompt = await self.llm.in_thread(chat_prompt, self.llm, self.body)
        return await start(self.llm, [prompt], self.params, self.body, entered)

    def reply(self, outputs: list[RequestOutput]) -> dict:
        """All choices. Takes long where there are many log-probabilities."""
        self.outputs, choices = outputs, []
        for completion in self.outputs[0].outputs:
            logprobs = self._logprobs(completion, 0)
            for copy in range(self.copies):
                choices.append(
                    {
                        "index": completion.index * self.copies + copy,
                        "message": {"role": "assistant", "content": completion.text},
                        "logprobs": logprobs,
                        "finish_reason": completion.finish_reason,
                        "stop_reason": completion.stop_reason,
                    }
                )
        return self._envelope("chat.completion", choices) | {"usage": usage(self.outputs, self.copies)}

    async def chunks(self, generation: Generation) -> AsyncIterator[dict]:
        """The choices as they grow: the role of each, their text, and how each has ended."""
        begun = False
        async for change in changes(generation, self.params.n, self.copies):
            self.outputs = [change.output]
            if not begun:
                begun = True
                for index in range(self.body.n):
                    yield self._chunk(index, {"role": "assistant", "content": ""})
            logprobs = self._logprobs(change.completion, change.num_seen)
            if change.text:
                yield self._chunk(change.index, {"content": change.text}, logprobs)
                logprobs = None
            if change.completion.finish_reason is not None:
                yield self._chunk(change.index, {}, logprobs, change.completion)
        if self.body.wants_usage:
            yield self._envelope("chat.completion.chunk", []) | {"usage": usage(self.outputs, self.copies)}

    def _chunk(
        self, index: int, delta: dict, logprobs: dict | None = None, ended: CompletionOutput | None = None
    ) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if ended is not None:
            choice |= {"finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}
        chunk = self._envelope("chat.completion.chunk", [choice])
        if self.body.wants_usage_always:
            chunk["usage"] = usage(self.outputs, self.copies)
        return chunk

    def _envelope(self, kind: str, choices: list[dict]) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, completion: CompletionOutput, num_seen: int) -> dict | None:
        if completion.logprobs is None or self.llm.engine.tokenizer is None:
            return None
        token_ids, tables = completion.token_ids[num_seen:], completion.logprobs[num_seen:]
        return chat_logprobs(self.llm.engine.tokenizer, token_ids, tables, self.num_top)
