"""The pages of a shop as text with numbered elements, and what clicking and typing does.

/            links to all below            /delivery    what each delivery costs, and how long it takes
/CATEGORY    products, a few a page        /newsletter  a form with one field
/product/N   one product                   /orders      orders of the past
/cart        what was put into it          /returns     a form
/checkout    a form
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from agentrl.tools import JSON

FORMS: Mapping[str, tuple[str, ...]] = {
    "newsletter": ("e-mail",),
    "returns": ("order number", "reason"),
    "checkout": ("name", "town", "delivery"),
}
"""The fields of each form."""
_SUBMIT = {"newsletter": "Subscribe", "returns": "Send the return", "checkout": "Order"}
MOST_CHARS = 100
_MOST_CART = _MOST_SENT = 20


class Product(NamedTuple):
    """price: in euros. facts: numbers by what they say, with their unit."""

    name: str
    category: str
    price: float
    facts: Mapping[str, float]


class Site(NamedTuple):
    """A shop. orders: of the past, number by date and item. deliveries: price (euros) and days by name."""

    name: str
    products: Sequence[Product]
    orders: Sequence[tuple[str, str, str]]
    deliveries: Mapping[str, tuple[float, int]]
    page_size: int

    @property
    def categories(self) -> list[str]:
        """All categories, each once."""
        return list(dict.fromkeys(product.category for product in self.products))

    def of(self, category: str) -> list[tuple[int, Product]]:
        """The products of a category, with their numbers."""
        return [(n, product) for n, product in enumerate(self.products) if product.category == category]


class Element(NamedTuple):
    """What can be clicked or typed into.

    act: `go` to the path target, `put` or `remove` the item, `submit` the form, or type into its `field`.
    """

    label: str
    act: str
    target: str = ""


Line: TypeAlias = str | Element
State: TypeAlias = dict[str, JSON]
"""`cart`: names; `typed`: texts by form and field; `sent`: the forms that were submitted."""


class Browser:
    """Where somebody is on a site, and what they have done there."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.path = "/"
        self.history: list[str] = []
        self.cart: list[str] = []
        self.typed: dict[str, dict[str, str]] = {form: {} for form in FORMS}
        self.sent: list[dict[str, JSON]] = []

    def page(self) -> str:
        """The page as text; elements are numbered from 1."""
        texts, number = [], 0
        for line in self._lines(self.path):
            if isinstance(line, Element):
                number += 1
                texts.append(f"[{number}] {self._described(line)}")
            else:
                texts.append(line)
        return "\n".join(texts)

    def element(self, number: int) -> Element | None:
        """The element of a number on this page; None = there is none."""
        elements = [line for line in self._lines(self.path) if isinstance(line, Element)]
        return elements[number - 1] if 1 <= number <= len(elements) else None

    def exists(self, path: str) -> bool:
        """Whether there is a page of this path."""
        return next(self._lines(path), None) is not None

    def go(self, path: str) -> None:
        """Open a page."""
        self.history = [*self.history, self.path][-100:]
        self.path = path

    def act(self, element: Element) -> str:
        """Click an element; what it did, beyond the page that is shown."""
        if element.act == "go":
            self.go(element.target)
        elif element.act == "put":
            if len(self.cart) == _MOST_CART:
                return "The cart is full."
            self.cart.append(element.target)
            return f"{element.target} is in the cart."
        elif element.act == "remove":
            self.cart.remove(element.target)
        else:
            return self._submitted(element.target)
        return ""

    def _submitted(self, form: str) -> str:
        fields = self.typed[form]
        missing = [name for name in FORMS[form] if not fields.get(name)]
        if missing:
            return f"Nothing was sent: fill in {missing[0]}."
        if form == "checkout" and not self.cart:
            return "Nothing was sent: the cart is empty."
        if form == "checkout" and fields["delivery"] not in self.site.deliveries:
            return f"Nothing was sent: delivery is {', '.join(self.site.deliveries)}."
        if len(self.sent) == _MOST_SENT:
            return "Nothing was sent: these are too many forms for one visit."
        items: dict[str, JSON] = {"items": [*sorted(self.cart)]} if form == "checkout" else {}
        self.sent.append({"form": form, **fields, **items})
        self.typed[form] = {}
        if form == "checkout":
            self.cart = []
        return "Thank you. It was sent."

    def _described(self, element: Element) -> str:
        if element.act == "field":
            return f"field {element.label}: {self.typed[element.target].get(element.label, '')}"
        return f"{'link' if element.act == 'go' else 'button'} {element.label}"

    def _lines(self, path: str) -> Iterator[Line]:
        """The lines of a page; none where there is no such page."""
        _, first, *rest = f"{path}//".split("/")
        if not first:
            yield from self._home()
        elif first in self.site.categories:
            yield from self._listed(first, rest[0])
        elif first == "product" and rest[0].isdecimal() and int(rest[0]) < len(self.site.products):
            yield from self._product(self.site.products[int(rest[0])])
        elif first in ("cart", "orders", "delivery"):
            yield from {"cart": self._cart, "orders": self._orders, "delivery": self._deliveries}[first]()
        elif first in FORMS:
            yield f"{self.site.name}: {first}"
            yield from (Element(name, "field", first) for name in FORMS[first])
            yield Element(_SUBMIT[first], "submit", first)
            yield Element("home", "go", "/")

    def _home(self) -> Iterator[Line]:
        yield self.site.name
        for name in (*self.site.categories, "cart", "delivery", "newsletter", "orders", "returns"):
            yield Element(name, "go", f"/{name}")

    def _listed(self, category: str, page: str) -> Iterator[Line]:
        every, size = self.site.of(category), self.site.page_size
        last = (len(every) - 1) // size + 1
        number = int(page) if page.isdecimal() and len(page) < 3 else 1
        if not 1 <= number <= last:
            return
        yield f"{self.site.name}: {category}, page {number} of {last}"
        for place, product in every[(number - 1) * size : number * size]:
            yield Element(f"{product.name}, {product.price:.2f} euros", "go", f"/product/{place}")
        if number < last:
            yield Element("next page", "go", f"/{category}/{number + 1}")
        yield Element("home", "go", "/")

    def _product(self, product: Product) -> Iterator[Line]:
        yield f"{self.site.name}: {product.name}"
        yield f"price: {product.price:.2f} euros"
        yield from (f"{name}: {value:g}" for name, value in product.facts.items())
        yield Element("put into the cart", "put", product.name)
        yield Element(product.category, "go", f"/{product.category}")
        yield Element("cart", "go", "/cart")

    def _cart(self) -> Iterator[Line]:
        yield f"{self.site.name}: cart, {len(self.cart)} items"
        yield from (Element(f"remove {name}", "remove", name) for name in self.cart)
        yield Element("checkout", "go", "/checkout")
        yield Element("home", "go", "/")

    def _orders(self) -> Iterator[Line]:
        yield f"{self.site.name}: your orders"
        yield from (f"order {number} of {date}: {item}" for number, date, item in self.site.orders)
        yield Element("returns", "go", "/returns")
        yield Element("home", "go", "/")

    def _deliveries(self) -> Iterator[Line]:
        yield f"{self.site.name}: delivery"
        for name, (price, days) in self.site.deliveries.items():
            yield f"{name}: {price:.2f} euros, {days} days"
        yield Element("home", "go", "/")
