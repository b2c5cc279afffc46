"""Slow links on one machine, so that overlap has something to hide: a modelled one, and a real one (root).

Loopback is as fast as memory, and a transfer there is CPU copying: nothing can be hidden behind computation.
`launch` runs a function on some ranks over a link of a chosen rate (Linux):

    modelled   gloo on loopback carries the bytes; a c10d backend then holds every all-to-all back until a
               serial full-duplex link would have carried it. Other collectives are not held back.
    real       gloo over network namespaces whose only connection is one token bucket, a shared medium: the
               bytes of all ranks and of every collective queue in it. No added latency (that needs netem).

**Nodes.** `ranks_per_node` puts ranks 0, 1, ... on nodes in that order, one a node by default. Each node
has a link inside it, with a rate of its own: what a rank sends to another node passes the link between
nodes, what it sends to another rank of its node the one inside, and an all-to-all that does both takes the
longer of the two. The two sorts of links run side by side:

    modelled   each rank has one serial full-duplex link of each sort.
    real       a namespace a node; its ranks meet on its loopback, through a token bucket of its own.

**The rate** means the same on both: payload bytes per second that *each* rank sends to others in an all-to-
all in which all ranks send as much; with several ranks a node, those bytes that leave the node, or inside
it those that do not. The real medium carries all ranks' bytes one after the other, so it runs at world
times that rate, plus headers, and a loopback at ranks_per_node times. Where the ranks send unequal amounts
the two differ: the modelled link takes the longer of what a rank sends and what it receives, the real one
the sum over all ranks.

    def work(link, rounds):              # module level; runs on each rank, in its own process
        link.set_rate(float("inf"))      # the computation alone
        ...
        link.set_rate(35e6)              # on all ranks, with nothing in flight
        return measure_rate()
    launch(2, work, link="modelled", rate=35e6, args=(9,))

    def on_nodes(link):                  # two nodes of two ranks
        link.set_rates(inter=10e6, intra=40e6)
        ...
    launch(4, on_nodes, link="modelled", rate=INFINITE, ranks_per_node=2)

All times are seconds of time.monotonic, all rates bytes per second.
"""

from bench.links.launch import launch
from bench.links.link import INFINITE, Link, LinkCost, LinkUnavailableError, measure_rate
from bench.links.modelled import ModelledLink, ModelledLinks, register_modelled

__all__ = [
    "INFINITE",
    "Link",
    "LinkCost",
    "LinkUnavailableError",
    "ModelledLink",
    "ModelledLinks",
    "launch",
    "measure_rate",
    "register_modelled",
]
