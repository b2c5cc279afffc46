"""Slow links on one machine, so that there is communication to hide: a modelled one, and a real one (root).

Loopback is as fast as memory, and a transfer on it is copying by the CPU: it cannot hide behind computation.
`launch` runs a function on some ranks over a link of a chosen rate (Linux):

    modelled   gloo on loopback carries the bytes. A c10d backend then holds every all-to-all back until a
               serial full-duplex link would have carried it. Other collectives are not held back.
    real       gloo over network namespaces whose only connection is one token bucket, a shared medium: the
               bytes of all ranks and of every collective queue in it. It adds no latency (that needs netem).

**Nodes.** `ranks_per_node` puts ranks 0, 1, ... on nodes in that order; the default is one rank a node. Bytes
to another node pass the link between nodes; bytes to another rank of the same node pass the link inside the
node, which has a rate of its own. Both sorts of links work at the same time, so an all-to-all over both takes
the longer of the
two:

    modelled   each rank has one serial full-duplex link of each sort.
    real       each node is a namespace; its ranks meet on its loopback, through another token bucket.

**The rate** means the same on both links: bytes of payload a second that *each* rank sends to others in an
all-to-all in which all ranks send the same amount. With several ranks a node, it counts the bytes that leave
the node, or for the link inside, the others. The real medium carries the bytes of all ranks one after the
other. So it runs at world times that rate, plus headers, and a loopback at ranks_per_node times. If ranks
send unequal amounts, the links differ: the modelled one takes the longer of what a rank sends and what it
receives, the real one the sum over all ranks.

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

All times are seconds of time.monotonic, all rates bytes a second.
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
