"""JSON-RPC of a served environment: the tools of a session, as OpenEnv and as MCP ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from agentrl.envs.openenv.replies import CALL_TOOL, FullError
from agentrl.envs.openenv.sessions import (
    Body,
    NamedAction,
    ServedSession,
    ServedSessions,
    described,
)
from agentrl.errors import AgentRLError
from agentrl.types import JSON

_PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26")
_INITIALIZE, _ENDS = "initialize", "openenv/session/close"
_OPENING = (_INITIALIZE, "openenv/session/create")


class RpcCode(IntEnum):
    """The codes of JSON-RPC."""

    PARSE = -32700
    REQUEST = -32600
    METHOD = -32601
    PARAMS = -32602
    INTERNAL = -32603
    SERVER = -32000


class _RefusedError(Exception):
    def __init__(self, code: RpcCode, sentence: str, **data: JSON) -> None:
        super().__init__(sentence)
        self.code, self.data = code, data


def error_reply(code: RpcCode, message: str, id: JSON, **data: JSON) -> Body:
    """A reply that says why a request failed."""
    error: Body = {"code": int(code), "message": message}
    return {"jsonrpc": "2.0", "id": id, "error": {**error, "data": data} if data else error}


class Rpc:
    """Answers requests over the sessions of a server."""

    def __init__(self, sessions: ServedSessions) -> None:
        self._sessions = sessions

    async def answer(
        self, asked: Mapping[str, JSON], session: ServedSession | None
    ) -> tuple[Body | None, ServedSession | None]:
        """The reply, and the session that the request has opened. session: that of the connection, if any.

        A notification has no reply.
        """
        id, method = asked.get("id"), asked.get("method")
        if isinstance(method, str) and method.startswith("notifications/"):
            return None, None
        try:
            result, opened = await self._handled(asked, session)
        except _RefusedError as error:
            return error_reply(error.code, str(error), id, **error.data), None
        except FullError as error:
            counts: Body = {"active_sessions": len(self._sessions), "max_sessions": self._sessions.most}
            return error_reply(RpcCode.SERVER, str(error), id, **counts), None
        except AgentRLError as error:
            return error_reply(RpcCode.INTERNAL, str(error), id), None
        return {"jsonrpc": "2.0", "id": id, "result": result}, opened

    async def _handled(
        self, asked: Mapping[str, JSON], session: ServedSession | None
    ) -> tuple[Body, ServedSession | None]:
        method, params = asked.get("method"), asked.get("params") or {}
        is_request = asked.get("jsonrpc") == "2.0" and not isinstance(asked.get("id"), dict | list)
        if not is_request or not isinstance(method, str):
            raise _RefusedError(RpcCode.REQUEST, "Invalid request")
        if not isinstance(params, dict):
            raise _RefusedError(RpcCode.PARAMS, "Params must be an object")
        if method == _ENDS and session is not None:
            raise _RefusedError(RpcCode.REQUEST, "A connection ends its own session when it is closed")
        if method not in _OPENING:
            return await self._result(method, params, self._session_of(params, session)), None
        opened = session or self._sessions.open()
        try:
            return await self._begun(opened, method, params), opened
        except AgentRLError:
            if opened is not session:
                await self._sessions.close(opened)
            raise

    def _session_of(self, params: Mapping[str, JSON], own: ServedSession | None) -> ServedSession | None:
        id = params.get("session_id")
        if id is None or own is not None:
            return own
        session = self._sessions.find(id)
        if session is None:
            raise _RefusedError(RpcCode.PARAMS, f"Unknown session_id: {str(id)[:40]}")
        return session

    async def _begun(self, session: ServedSession, method: str, params: Mapping[str, JSON]) -> Body:
        if method != _INITIALIZE:
            return {"session_id": session.id}
        await session.reset({})
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in _PROTOCOLS else _PROTOCOLS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": self._sessions.world.example.id, "version": "1"},
            "instructions": session.prompt,
        }

    async def _result(self, method: str, params: Mapping[str, JSON], session: ServedSession | None) -> Body:
        if method == "ping":
            return {}
        if method == "tools/list":
            tools = self._sessions.world.example.tool_schemas if session is None else session.tools
            return {"tools": described(tools, "inputSchema")}
        if method not in ("tools/call", _ENDS):
            raise _RefusedError(RpcCode.METHOD, f"Method not found: {method[:40]}")
        if session is None:
            raise _RefusedError(RpcCode.PARAMS, "Invalid params - 'session_id' is required")
        return await (self._closed(session) if method == _ENDS else self._called(session, params))

    async def _closed(self, session: ServedSession) -> Body:
        if session.is_attached:
            # Its client has closed the WebSocket a moment ago, or will.
            session.is_leaving = True
            return {"session_id": session.id, "closed": False, "closing": True}
        await self._sessions.close(session)
        return {"session_id": session.id, "closed": True}

    async def _called(self, session: ServedSession, params: Mapping[str, JSON]) -> Body:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not name:
            raise _RefusedError(RpcCode.PARAMS, "Missing 'name' in params")
        if not isinstance(arguments, dict):
            raise _RefusedError(RpcCode.PARAMS, "'arguments' must be an object")
        reply = await session.step(NamedAction(CALL_TOOL, "", name, arguments))
        observation = reply["observation"]
        text = observation["text"] if isinstance(observation, dict) else ""
        return {
            "content": [{"type": "text", "text": text}],
            "isError": False,
            "data": text,
            "_meta": {"reward": reply["reward"], "done": reply["done"]},
        }
