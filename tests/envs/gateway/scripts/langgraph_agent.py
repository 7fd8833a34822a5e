"""An agent of LangGraph over LangChain's client of OpenAI."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(
    model="m", streaming="streamed" in sys.argv[1], use_responses_api="responses" in sys.argv[1]
)
agent = create_react_agent(model, [add], prompt="Be brief.")
state = agent.invoke({"messages": [{"role": "user", "content": "How many are 2 and 3?"}]})
last = state["messages"][-1].content
print(last if isinstance(last, str) else "".join(part["text"] for part in last))
