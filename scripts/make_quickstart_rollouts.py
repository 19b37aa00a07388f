"""Write the rollouts of the quickstart: a library desk agent with tools, several sampled rollouts of each task.

    python scripts/make_quickstart_rollouts.py [recipes/data/quickstart_rollouts.jsonl]

The rollouts of a task have a common beginning and branch at different depths, like samples of one policy: up to its
point of divergence a rollout takes the first variant of every step, there it takes another one, and after it any
variant. People, books and texts are invented. The same code writes the same bytes.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SEED = 553
ROLLOUTS_PER_TASK = 6
OUTPUT = Path(__file__).resolve().parent.parent / "recipes" / "data" / "quickstart_rollouts.jsonl"

POLICY = """You are the desk assistant of the Alder Street Library. Today is Tuesday, 4 March 2025.

Rules
- Ask for the card number and look the member up before you do anything else.
- One tool call at a time, and no message to the member in the same turn as a call.
- State what you are about to change and wait for a yes before renew_loan, place_hold or charge_fine.
- A loan can be renewed twice, for 21 days each, unless another member waits for the item.
- A member who owes more than 5.00 cannot place holds until the fine is paid.
- Holds are kept for 7 days at the branch the member chooses: Alder Street, Mill Lane or Harbour.
- Never reveal one member's data to another, and do not recommend books.

Tools
- find_member(card): name, home branch and fines of a member
- list_loans(card): current loans with due dates and renewals
- search_catalogue(query): items with copies and waiting members
- renew_loan(loan_id): extends a loan by 21 days
- place_hold(card, item_id, branch): reserves an item
- charge_fine(card, amount): takes a payment from the stored bank card"""


@dataclass(kw_only=True)
class Task:
    name: str
    card: str
    branch: str
    title: str
    author: str
    item: str
    fine: str = "0.00"
    copies: int = 1
    waiting: int = 0
    loan: str = ""
    due: str = ""
    new_due: str = ""


@dataclass(kw_only=True)
class Rollout:
    rng: random.Random
    diverges_at: int
    reward: float = 1.0
    step: int = 0
    messages: list[dict] = field(default_factory=lambda: [{"role": "system", "content": POLICY}])

    def choose(self, variants: int) -> int:
        """Index of the variant the policy samples at this step."""
        step = self.step
        self.step += 1
        if step < self.diverges_at:
            return 0
        if step == self.diverges_at:
            return 1 + self._below(variants - 1)
        return self._below(variants)

    def user(self, *variants: str) -> None:
        """Add the member's words, which vary only after the rollout has diverged."""
        index = self._below(len(variants)) if self.step > self.diverges_at else 0
        self.messages.append({"role": "user", "content": variants[index]})

    def say(self, *variants: str) -> int:
        index = self.choose(len(variants))
        self.messages.append({"role": "assistant", "content": variants[index]})
        return index

    def call(self, result: dict | list, name: str, *arguments: dict) -> int:
        """Add one tool call; the variants of ``arguments`` are spellings with the same answer of the tool."""
        index = self.choose(len(arguments))
        text = json.dumps(arguments[index], separators=(",", ":"))
        self.messages.append({"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": text}]})
        self.messages.append({"role": "tool", "content": json.dumps(result), "name": name})
        return index

    def _below(self, bound: int) -> int:
        # Python guarantees the same sequence in every version only for random().
        return int(self.rng.random() * bound)


def identify(rollout: Rollout, task: Task, *requests: str) -> None:
    rollout.user(*requests)
    rollout.say(
        "I can help with that. Could you give me your library card number, please?",
        "Of course. What is the number on your library card?",
        "Happy to help! Please tell me your library card number so that I can find your account.",
        "Sure. May I have your card number first?",
    )
    rollout.user(
        f"It's {task.card}.",
        f"Yes, the card says {task.card}.",
        f"One moment... {task.card}. The name is {task.name}.",
    )
    rollout.call(
        {"card": task.card, "name": task.name, "home_branch": task.branch, "fines": task.fine, "blocked": False},
        "find_member",
        {"card": task.card},
        {"card": task.card.replace("-", "")},
        {"card": task.card.lower()},
    )


def close(rollout: Rollout, *variants: str) -> None:
    rollout.say(*variants)
    if rollout._below(2) and rollout.step > rollout.diverges_at:
        rollout.user("That's all, thank you.", "Great, thanks for your help!")


def renew(rollout: Rollout, task: Task) -> None:
    identify(
        rollout,
        task,
        f'Hello, I would like to keep "{task.title}" a little longer. Can you renew it?',
    )
    loan = {"loan_id": task.loan, "title": task.title, "due": task.due, "renewals": 1, "waiting": task.waiting}
    rollout.call([loan], "list_loans", {"card": task.card}, {"card": task.card.replace("-", "")})
    asked = rollout.say(
        f'Thank you, {task.name}. "{task.title}" is due on {task.due}. I can renew it for 21 days, until '
        f"{task.new_due}; this is the second and last renewal. Shall I go ahead?",
        f'I found your loan of "{task.title}", due {task.due}. Nobody is waiting for it, so the due date can move to '
        f"{task.new_due}. Do you want me to renew it?",
        f'"{task.title}" by {task.author} can be renewed once more. The new due date would be {task.new_due}. Is that '
        "all right?",
        f'I am renewing "{task.title}" for you now.',
    )
    if asked == 3:
        rollout.reward = 0.0
    else:
        rollout.user("Yes, please.", f"Yes, {task.new_due} is perfect.", "Please do.")
    rollout.call(
        {"loan_id": task.loan, "due": task.new_due, "renewals": 2},
        "renew_loan",
        {"loan_id": task.loan},
        {"loan_id": task.loan.lower()},
    )
    close(
        rollout,
        f'Done. "{task.title}" is now due on {task.new_due}. Is there anything else?',
        f"Your loan is renewed until {task.new_due}. It cannot be renewed again after that.",
        f'"{task.title}" is yours until {task.new_due}. Have a nice day!',
    )


def search(rollout: Rollout, task: Task) -> None:
    rollout.call(
        [
            {
                "item_id": task.item,
                "title": task.title,
                "author": task.author,
                "copies": task.copies,
                "on_shelf": 0,
                "waiting": task.waiting,
            }
        ],
        "search_catalogue",
        {"query": task.title},
        {"query": f"{task.title} {task.author}"},
        {"query": task.author},
    )


def place_hold(rollout: Rollout, task: Task) -> None:
    rollout.call(
        {"item_id": task.item, "branch": task.branch, "position": task.waiting + 1, "kept_days": 7},
        "place_hold",
        {"card": task.card, "item_id": task.item, "branch": task.branch},
        {"item_id": task.item, "card": task.card, "branch": task.branch},
    )


def reserve(rollout: Rollout, task: Task) -> None:
    identify(
        rollout,
        task,
        f'Good morning! Could you reserve "{task.title}" by {task.author} for me? I would pick it up at {task.branch}.',
    )
    search(rollout, task)
    asked = rollout.say(
        f'"{task.title}" is out on loan at the moment; you would be number {task.waiting + 1} in the queue. Shall I '
        f"place a hold for pick-up at {task.branch}?",
        f"All {task.copies} copies are out. I can place a hold at {task.branch}, where it will be kept for 7 days once "
        "it arrives. Would you like that?",
        f'I found "{task.title}" by {task.author}. There are {task.waiting} members waiting before you. Should I '
        f"reserve it for you at {task.branch}?",
        f'No copy is on the shelf, so I will reserve "{task.title}" for you.',
    )
    if asked == 3:
        rollout.reward = 0.0
    else:
        rollout.user("Yes, go ahead.", "That's fine, I can wait.", f"Yes, {task.branch} is right.")
    place_hold(rollout, task)
    close(
        rollout,
        f"Your hold is placed. You are number {task.waiting + 1} in the queue, and we will write to you when the book "
        f"is at {task.branch}.",
        f'"{task.title}" is reserved for you at {task.branch}. It will be kept for 7 days after it arrives.',
        f"All set: position {task.waiting + 1}, pick-up at {task.branch}. Is there anything else I can do?",
    )


def charge(rollout: Rollout, task: Task) -> None:
    rollout.call(
        {"card": task.card, "charged": task.fine, "fines": "0.00", "receipt": f"R-{task.item[-4:]}"},
        "charge_fine",
        {"card": task.card, "amount": task.fine},
        {"amount": task.fine, "card": task.card},
    )


def pay(rollout: Rollout, task: Task) -> None:
    identify(rollout, task, f'Hi, I returned "{task.title}" late. Do I owe anything, and can I pay it here?')
    asked = rollout.say(
        f"Yes, {task.name}, there is a fine of {task.fine} on your account. I can take it from the bank card on file. "
        "Shall I do that now?",
        f"Your account shows {task.fine} in fines. Would you like me to charge your stored bank card?",
        f'The late return of "{task.title}" cost {task.fine}. If you say yes, I will take the payment from your stored '
        "bank card.",
        f"You owe {task.fine}. I will charge your bank card for it.",
    )
    if asked == 3:
        rollout.reward = 0.0
    else:
        rollout.user("Yes, please charge it.", "Go ahead.", f"{task.fine}? All right, yes.")
    charge(rollout, task)
    close(
        rollout,
        f"Thank you. {task.fine} has been paid and your account is clear. The receipt is R-{task.item[-4:]}.",
        f"The payment of {task.fine} went through; you owe nothing now.",
        f"Paid. Your receipt number is R-{task.item[-4:]}. Is there anything else?",
    )


def reserve_with_fine(rollout: Rollout, task: Task) -> None:
    identify(
        rollout,
        task,
        f'Hello, please put "{task.title}" by {task.author} on hold for me at {task.branch}.',
    )
    search(rollout, task)
    decision = rollout.say(
        f"I can place that hold once your fine of {task.fine} is paid; above 5.00 holds are not possible. May I charge "
        f'your stored bank card {task.fine} and then reserve "{task.title}" at {task.branch}?',
        f'"{task.title}" can be reserved, but your account shows {task.fine} in fines and the limit is 5.00. Would you '
        "like to pay with your stored bank card now, so that I can place the hold?",
        f"There is a fine of {task.fine} on your account. Shall I take the payment first and then place the hold at "
        f"{task.branch}?",
        f"You owe {task.fine}, so I am sorry, I cannot place holds for you.",
    )
    if decision == 3:
        rollout.reward = 0.0
        rollout.user("Oh. Can I pay it now?", "Is there nothing to be done about that?")
        rollout.say(
            f"Yes. I can take {task.fine} from your stored bank card. Do you agree?",
            f"You can pay {task.fine} here with the bank card on file. Shall I charge it?",
        )
    rollout.user("Yes, do both, please.", "I had forgotten about that. Yes, please.", "Fine, go ahead with both.")
    charge(rollout, task)
    place_hold(rollout, task)
    close(
        rollout,
        f'Both are done: {task.fine} is paid, and "{task.title}" is on hold at {task.branch}, position '
        f"{task.waiting + 1} in the queue.",
        f"Your fine is settled and the hold is placed. We will write to you when the book arrives at {task.branch}.",
        f'Thank you for the payment of {task.fine}. You are number {task.waiting + 1} in the queue for "{task.title}".',
    )


# fmt: off
TASKS: list[tuple[Callable[[Rollout, Task], None], Task]] = [
    (renew, Task(name="Ines Okafor", card="AL-20418", branch="Alder Street", title="The Salt Road",
                 author="M. Hartwell", item="IT-70213", loan="LN-5521", due="2025-03-06", new_due="2025-03-27")),
    (reserve, Task(name="Tomas Lindqvist", card="AL-11873", branch="Mill Lane", title="A Field Guide to Mosses",
                   author="R. Adeyemi", item="IT-33842", copies=2, waiting=3)),
    (pay, Task(name="Priya Raman", card="AL-30927", branch="Harbour", title="Winter Kitchens",
               author="J. Castellan", item="IT-51190", fine="3.40")),
    (reserve_with_fine, Task(name="George Mbeki", card="AL-17765", branch="Harbour", title="Lighthouse Keepers",
                             author="S. Thorne", item="IT-46027", fine="7.80", copies=1, waiting=1)),
    (renew, Task(name="Clara Voss", card="AL-28850", branch="Mill Lane", title="Bread and Patience",
                 author="L. Moreau", item="IT-12604", loan="LN-8137", due="2025-03-05", new_due="2025-03-26")),
    (reserve, Task(name="Daniel Reyes", card="AL-14392", branch="Alder Street", title="The Cartographer's Niece",
                   author="E. Whitcombe", item="IT-60458", copies=4, waiting=11)),
    (pay, Task(name="Hana Sato", card="AL-25516", branch="Alder Street", title="Small Engines Explained",
               author="P. Novak", item="IT-29371", fine="6.20")),
    (reserve_with_fine, Task(name="Oliver Brandt", card="AL-33104", branch="Mill Lane", title="Rivers of Glass",
                             author="N. Achterberg", item="IT-81745", fine="9.15", copies=3, waiting=5)),
]
# fmt: on


def rollouts() -> list[dict]:
    rng = random.Random(SEED)
    rows = []
    for task_id, (scenario, task) in enumerate(TASKS):
        for trial in range(ROLLOUTS_PER_TASK):
            # The first rollout never diverges; the others diverge at their second to fifth assistant turn.
            rollout = Rollout(rng=rng, diverges_at=99 if trial == 0 else 1 + int(rng.random() * 4))
            scenario(rollout, task)
            rows.append({"task_id": task_id, "trial": trial, "reward": rollout.reward, "messages": rollout.messages})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT, help="JSON Lines (default: %(default)s)")
    output = parser.parse_args().output
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rollouts()]
    output.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{output}: {len(lines)} rollouts")


if __name__ == "__main__":
    main()
