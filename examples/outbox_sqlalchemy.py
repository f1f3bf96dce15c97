"""An order and its message in one transaction: `python examples/outbox_sqlalchemy.py` (needs 'heapline[outbox]').

If the transaction commits, the message is enqueued once; otherwise it is never enqueued. To keep the example short, the
relay runs in the same process and, without HEAPLINE_URL, on a directory. In production it is a process of its own,
`heapline outbox relay --database …`, connected to a server.
"""

import asyncio
import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import heapline
from heapline import outbox


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


engine = create_engine("sqlite:///shop.db")


def place_order(item: str, *, card_is_good: bool = True) -> None:
    with Session(engine) as session, session.begin():
        order = Order(item=item)
        session.add(order)
        session.flush()  # for its id
        outbox.enqueue(session, "bills", f"bill order {order.id} ({item})".encode())
        if not card_is_good:
            raise ValueError("the card was declined")


async def main() -> None:
    Base.metadata.create_all(engine)
    outbox.create_tables(engine)
    place_order("tea")
    try:
        place_order("a yacht", card_is_good=False)
    except ValueError as error:
        print(error)
    broker = heapline.connect_from_env() if "HEAPLINE_URL" in os.environ else heapline.open("data")
    async with broker as hl, outbox.OutboxRelay(engine, hl) as relay:
        await hl.create_topic("bills")
        print("relayed:", await relay.run_once())
        for m in await hl.pop("bills", 10):
            print(m.payload.decode())
            await m.ack()
    engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
