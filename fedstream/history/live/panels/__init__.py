"""What the live page shows of a scene: pure functions, and how their values look.

stalled            why nothing moves, in one sentence
flow               where tasks are, and the bottleneck
lanes              who has which task
curves, heat       curves and bars; heat maps as tables
weights            what the strategy's rule says of a stale update
outcomes, alarms   how tasks end; which alerts would fire
devices            what each device did, and who stands out
"""

from __future__ import annotations

from fedstream.history.live.panel import LivePanel
from fedstream.history.live.panels import drawn

PANELS = (
    LivePanel("flow", "Where the tasks are", drawn.flow_html, wide=True),
    LivePanel("metrics", "Accuracy and loss", drawn.metrics_html, wide=True),
    LivePanel("lanes", "Who has which task", drawn.lanes_html, wide=True),
    LivePanel("staleness", "Staleness over time", drawn.staleness_html, wide=True),
    LivePanel("weights", "Weight and staleness", drawn.weights_html),
    LivePanel("outcomes", "How tasks ended", drawn.outcomes_html),
    LivePanel("pace", "Pace, queue and memory", drawn.pace_html, wide=True),
    LivePanel("alarms", "Alerts", drawn.alarms_html, wide=True),
    LivePanel("devices", "Devices", drawn.devices_html, wide=True),
)
"""In the order in which they are shown."""
headline = drawn.headline_html
