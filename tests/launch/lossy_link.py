"""lossy_link.py A B DELAY_MS LOSS: carry frames between two interfaces, late, and some of them never."""

import heapq
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR = 263, 15  # linux/if_packet.h


def main(first: str, second: str, delay: float, loss: float) -> None:
    ends = []
    for name in (first, second):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
        # What the kernel knows of a frame goes with it: a checksum still to be filled in, many packets in one.
        end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        end.bind((name, 0))
        ends.append(end)
    chance, waiting, count = random.Random(0), [], 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], timeout)[0]:
            frame, address = end.recvfrom(66_000)
            if address[2] != socket.PACKET_OUTGOING and chance.random() >= loss:
                count += 1
                other = ends[1 - ends.index(end)]
                heapq.heappush(waiting, (time.monotonic() + delay, count, frame, other))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, other = heapq.heappop(waiting)
            try:
                other.send(frame)
            except OSError:  # larger than the interface takes, or it is down: lost
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000, float(sys.argv[4]))
