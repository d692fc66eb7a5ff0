"""The words of the pages, explained."""

from feddg.report.blocks import Cell, Column, Fold, Section, Table

WORDS = {
    "Accuracy": "The share of images that the model names correctly.",
    "Balanced accuracy": "The mean, over the classes, of the share of a class's images that are "
    "recognised. A model that always gives the same answer has one over the number of classes.",
    "Client": "A site, or a simulated one, that trains on images of its own.",
    "Domain": "Images of one kind or source, such as photographs or one hospital's microscope.",
    "Held-out": "A domain that no client trains on. The test domain stands for the unseen one; a "
    "validation domain may choose the round, the test domain never does.",
    "In-domain": "Images of the domains that clients train on, kept out of the training.",
    "Interval (95 %)": "A run's: how far its accuracy may be from that on endless images of the "
    "same kind (Wilson). A margin's: how far it may be from that over endless seeds and scenarios "
    "(Student's t). Neither speaks for other data.",
    "Largest class": "The share of the commonest class among the images: what a constant model, "
    "which always names that class, reaches.",
    "Margin": "A difference of two methods' accuracies, in percentage points.",
    "Precision": "Of the images that got a class's name, the share that are of it.",
    "Recall": "Of a class's images, the share that got its name.",
    "Round": "Clients train for a while, the server makes one model of theirs. Round 0 is before "
    "any training.",
    "Seed": "The number from which all chance in a run is drawn. Other seeds show how much of a "
    "result is chance.",
}
"""Plain explanations, by word."""


def glossary() -> Section:
    """A section with every word, closed until asked for."""
    columns = [Column("Word", numeric=False), Column("Meaning", numeric=False)]
    rows = [[Cell(word), Cell(meaning)] for word, meaning in WORDS.items()]
    return Section("Words", [Fold("What the words on this page mean", [Table(columns, rows)])])
