"""What a server answered, as text for the model."""

from __future__ import annotations

import json

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

NOTHING = "The tool returned nothing."


def text_of(result: CallToolResult) -> str:
    """The text of all content blocks, one below the other; structured content as JSON where there are none.

    A block that is not text becomes a line in brackets that says what is not shown. The text is never empty.
    """
    parts = [_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or NOTHING


def _text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type} not shown: {block.mime_type}, {_bytes(block.data)}]"
        case ResourceLink():
            return f"[resource not shown: {block.name}, {block.uri}]"
        case EmbeddedResource():
            return f"[resource not shown: {block.resource.uri}, {_size(block.resource)}]"


def _size(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return f"{len(resource.text):,} characters"
    return _bytes(resource.blob)


def _bytes(base64_text: str) -> str:
    padding = len(base64_text) - len(base64_text.rstrip("="))
    return f"{len(base64_text) * 3 // 4 - padding:,} bytes"
