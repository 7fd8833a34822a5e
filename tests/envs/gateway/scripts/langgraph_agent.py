"""An agent of LangGraph over LangChain's client of OpenAI; one keeps the newest messages alone."""

from langchain_core.messages import trim_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from playing import SYSTEM, serve
from playing import open_box as opened


@tool
def open_box(box: str) -> str:
    """Open a box."""
    return opened(box)


def newest(state):
    """The question, and the last call with its result."""
    question, *rest = state["messages"]
    kept = (
        trim_messages(rest, max_tokens=2, token_counter=len, strategy="last", start_on="ai") if rest else []
    )
    return {"llm_input_messages": [question, *kept]}


def played(question, hook=None, **settings):
    agent = create_react_agent(
        ChatOpenAI(model="m", **settings), [open_box], prompt=SYSTEM, pre_model_hook=hook
    )
    asked = {"messages": [{"role": "user", "content": question}]}
    last = agent.invoke(asked, {"recursion_limit": 16})["messages"][-1].content
    return last if isinstance(last, str) else "".join(part["text"] for part in last)


serve(
    {
        "chat": played,
        "chat streamed": lambda question: played(question, streaming=True),
        "responses": lambda question: played(question, use_responses_api=True),
        "trimmed": lambda question: played(question, newest),
    }
)
