"""HopSearch: questions of one and two hops over a synthetic knowledge base, with a search tool."""
