"""Charts of who holds what: each client's images over the domains, or over the classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from feddg.records import ClientRow, ClientsTable
from feddg.report.blocks import Chart
from feddg.report.charts import HEAT_COLOURS, chart_of, label_of, names_axis, row_shares

MOST_COLUMNS = 100
LABELLED_CLIENTS = 24
TALLEST = 1000
"""Pixels of all rows together; of very many, each is a thin line."""


def client_heat_map(clients: ClientsTable, by: str) -> Chart:
    """How each client's images spread over the domains, or over the classes.

    Clients stand in the order of their main domain. Beyond ``MOST_COLUMNS`` clients, neighbours
    with the same main domain share a column, which then shows their images taken together.

    Args:
        clients: Who holds what.
        by: ``domains`` or ``classes``.
    """
    counts = np.array([getattr(client, by) for client in clients.clients], dtype=np.float64)
    held = np.flatnonzero(counts.sum(axis=0)) if by == "domains" else np.arange(counts.shape[1])
    names = [getattr(clients, by)[index] for index in held]
    groups = client_groups(np.array([client.domains for client in clients.clients]))
    columns = np.stack([counts[group][:, held].sum(axis=0) for group in groups])
    titles = [_group_title([clients.clients[index] for index in group]) for group in groups]
    heat = go.Heatmap(
        z=(100 * row_shares(columns)).T.round(1).tolist(),
        customdata=columns.T.astype(int).tolist(),
        text=[[f"{title}<br>{label_of(name)}" for title in titles] for name in names],
        hovertemplate="%{text}: %{customdata} images, %{z:.1f} %<extra></extra>",
        zmin=0,
        zmax=100,
        colorscale=HEAT_COLOURS,
        showscale=False,
        xgap=1 if len(groups) <= 60 else 0,
        ygap=2 if len(names) <= 60 else 0,
    )
    return chart_of(
        [heat],
        _heat_layout(clients, groups, names),
        130 + round(min(34, TALLEST / len(names)) * len(names)),
        _heat_caption(by, together=len(groups) < len(counts)),
    )


def client_groups(domain_counts: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Clients in the order of their main domain, cut into at most ``MOST_COLUMNS`` or so groups.

    Args:
        domain_counts: ``(clients, domains)`` numbers of images.

    Returns:
        Row indices, group by group; every client is in exactly one, and all clients of a group
        have the same main domain.
    """
    main = domain_counts.argmax(axis=1)
    share = row_shares(domain_counts.astype(np.float64)).max(axis=1)
    order = np.lexsort((-share, main))
    per_column = -(-len(order) // MOST_COLUMNS)
    groups: list[NDArray[np.intp]] = []
    for domain in np.unique(main):
        members = order[main[order] == domain]
        groups += np.array_split(members, -(-len(members) // per_column))
    return groups


def _group_title(members: Sequence[ClientRow]) -> str:
    if len(members) == 1:
        return label_of(members[0].name)
    return f"{len(members)} clients together"


def _heat_layout(
    clients: ClientsTable, groups: Sequence[NDArray[np.intp]], names: Sequence[str]
) -> dict[str, Any]:
    total = len(clients.clients)
    title = "clients, by main domain"
    if total <= LABELLED_CLIENTS:
        x_axis = names_axis([clients.clients[group[0]].name for group in groups], title)
    else:
        x_axis = {"title": {"text": title}, "showticklabels": False}
    y_axis = names_axis(names, "") | {"autorange": "reversed", "showgrid": False}
    return {"xaxis": x_axis | {"showgrid": False}, "yaxis": y_axis}


def _heat_caption(by: str, together: bool) -> str:
    what = "domain" if by == "domains" else "class"
    column = "a few similar clients taken together" if together else "a client"
    return (
        f"Each column is {column}, each row a {what}. The darker, the larger the share of the "
        "images in the column, which add up to 100 %."
    )
