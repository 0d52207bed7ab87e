"""What the interpreter says when a kernel does something wrong, or something it does not know."""


class PtxError(Exception):
    """`kind` is a word that tests compare: race, barrier, bounds, alignment, uninitialised, in-flight, lanes, launch,
    unsupported, parse, stuck."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind, self.text, self.where = kind, text, ""

    def at(self, where):
        self.where = self.where or where
        return self

    def __str__(self):
        return f"{self.kind}: {self.text}" + (f"\n  at {self.where}" if self.where else "")
