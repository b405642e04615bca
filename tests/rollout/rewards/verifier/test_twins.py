"""Spellings of a right answer, each beside a wrong answer that differs from it in the same place."""

import pytest

from jackpot.rollout.rewards.verifier.compare import compare, compare_without_algebra, is_readable
from jackpot.rollout.rewards.verifier.expressions import equal_expressions

POWERS_OF_TEN = [  # right answer, wrong answer, reference
    (r"4.5 \times 10^{33}", r"4.5 \times 10^{32}", "4.5e33"),
    (r"4.5 \cdot 10^{33}", r"4.5 \cdot 10^{-33}", "4.5e33"),
    ("45" + "0" * 32, "45" + "0" * 31, "4.5e33"),
    ("4.5E33", "4.5E34", "4.5e33"),
    (r"4.5 \times 10³³", r"4.5 \times 10³²", "4.5e33"),
    ("4.5 x 10^33", "4.5 x 10^3", "4.5e+33"),
    ("4.5*10^33", "4.5*10^34", "4.5e33"),
    ("3000000", "6e3", "3e6"),
    ("3000000", "2e9", "3e6"),
    ("1e-3", "1e3", "0.001"),
    ("1.5e3", "1.5e-3", "1500"),
    (r"0.1 \cdot 10⁻²", r"0.1 \cdot 10²", "1e-3"),
    (r"3e-5 \text{ m}", r"3e-6 \text{ m}", r"3 \times 10^{-5}"),
    ("3e8 m/s", "3e9 m/s", "3e8"),
    ("(0.00003, 0.0002)", "(0.0003, 0.0002)", "(3e-5, 2e-4)"),
    ("1E5", "1E6", "1E5_{16}"),
    ("1E5_{16}", "100000_{16}", "1E5_{16}"),
    ("3e - 1", "3e - 2", "3e-1"),
]
UNITS = [
    ("24", "25", r"24 \text{ km/h}"),
    ("24", "25", "24 km/h"),
    ("24", "25", r"24\ \mathrm{mi} / \mathrm{hr}"),
    ("24", "25", r"24\text{ m}^3/\text{s}"),
    (r"24 \text{ km/h}", r"24 \text{ thousand km/h}", "24"),
    (r"5 \text{ ft/s}^2", r"5 \text{ ft/2}", "5"),
    ("5 km per hour", "5 km per minute", r"5 \text{ km/h}"),
    (r"5\,\frac{\text{km}}{\text{h}}", r"5\,\frac{\text{h}}{\text{km}}", r"5 \text{ km/h}"),
    (r"5\,\mathrm{m\,s^{-2}}", r"5\,\mathrm{m\,s^{-1}}", r"5 \text{ m/s}^2"),
    (r"5\,\mathrm{m}\cdot\mathrm{s}^{-2}", r"5\,\mathrm{m}\cdot\mathrm{s}^{2}", r"5 \text{ m/s}^2"),
    ("5 meters per second squared", "5 meters per second", r"5 \text{ m/s}^2"),
    ("5 miles per hour", "5 km per hour", r"5\text{ mph}"),
    ("5 m/s", "5m/s", "5"),
    ("3 joules", r"3\text{ kJ}", r"3\text{ J}"),
    ("300", r"300\text{ kelvin m}", r"300\text{ K}"),
    (r"300\text{ kelvins}", r"300\text{ mK}", r"300\text{ K}"),
    (r"25\text{ degrees Celsius}", r"25^\circ\text{F}", r"25^\circ\text{C}"),
    ("10", r"10\text{ p.m.}", r"10\text{ a.m.}"),
    (r"5\ \mu\mathrm{m}", r"5\ \mathrm{m}", r"5\text{ μm}"),
    (r"5\ \mathrm{\mu m}", r"5\ \mathrm{mm}", r"5\ \mu\mathrm{m}"),
    (r"2 \text{ apples/box}", r"2 \text{ pi/box}", "2"),
]
NO_LABELS = [
    (r"36\text{ cubes}", r"36\text{ pi}", "36"),
    (r"36 \text{ cm}^2", r"36\text{ π cm}^2", "36"),
    (r"36\text{ π}", r"36", r"36\pi"),
    (r"9\text{ units}", r"9\text{π}", "9"),
    (r"2\text{ infants}", r"2\text{ inf}", "2"),
    (r"5\text{ times}", r"5\text{·x}", "5 \\text{ times}"),
    (r"5\text{ boxes}", r"5\text{ ≤ x}", "5"),
    (r"5\text{ boxes}", r"5\text{ x}", "5"),
    (r"3\text{ pieces}", r"3\text{ times pi}", "3"),
    (r"3\text{ m}", r"3 \text{ M}", "3"),
    (r"3\text{ kilograms}", r"3\text{ kilo}", "3"),
    (r"3\text{ illustrations}", r"3 \text{ nonillion}", "3"),
    (r"3 \text{ degrees}", r"3 \text{ degrees below zero}", "3"),
    (r"3\text{ rooms}", r"3\text{ double}", "3"),
    (r"300\text{ persons}", r"300\text{ K}", "300"),
    (r"2000\text{ mg}", "2000mg", "2000"),
]
WRAPPED = [
    (r"\text{42}", r"\text{43}", "42"),
    (r"\mathrm{42}", r"\mathrm{-42}", "42"),
    (r"\text{42}", r"\text{42 thousand}", "42"),
    ("42", "43", r"\text{42}"),
    (r"\text{4 cm}", r"\text{4 m}", r"4\text{ cm}"),
    ("4", "5", r"\text{4 cm}"),
    (r"\text{\$4}", r"\text{\$5}", "4"),
    (r"\color{red}{4}", r"\color{red}{5}", "4"),
    (r"\textcolor{red}{\frac{1}{2}}", r"\textcolor{red}{\frac{1}{3}}", "1/2"),
    (r"\underline{4}", r"\underline{5}", "4"),
    (r"4:30 \text{ p.m.}", r"4:30 \text{ a.m.}", r"\text{4:30 p.m.}"),
    (r"\text{4:30 p.m.}", r"\text{4:31 p.m.}", r"4:30 \text{ p.m.}"),
]
SIGNS = [
    (r"\sqrt[3]2", r"\sqrt[4]2", r"\sqrt[3]{2}"),
    (r"2\sqrt[3]{3}", r"2\sqrt[3]{2}", r"2\sqrt[3]3"),
    ("√2", "√3", r"\sqrt{2}"),
    ("√(x+1)", "√(x+2)", r"\sqrt{x+1}"),
    ("√π", "√2", r"\sqrt{\pi}"),
    ("x²", "x³", "x^2"),
    ("½", "⅓", "1/2"),
    ("2½", "2⅓", "5/2"),
    (r"0.\overline{3}", "0.3", "1/3"),
    ("15/11", "1.36", r"1.\overline{36}"),
    (r"\frac94 = 2.25", r"\frac94 = 2.5", "2.25"),
    (r"x = \frac94 = 2.25", r"x = \frac92 = 2.25", "9/4"),
    ("5", "6", r"$\mathrm{r}=5$"),
    (r"\mathrm{r}=5", r"\mathrm{s}=5", "r=5"),
    (r"p \rightarrow q", r"q \rightarrow p", r"p\to q"),
    (r"\textbf{(B) }142", r"\textbf{(B) }143", "142"),
]
TABLES = {"powers": POWERS_OF_TEN, "units": UNITS, "labels": NO_LABELS, "wrapped": WRAPPED, "signs": SIGNS}
TWINS = [pytest.param(*twin, id=f"{name}: {twin[0]}") for name, table in TABLES.items() for twin in table]
BY_ALGEBRA = [
    (r"3\cdot4=12", r"3\cdot5=12", "12"),
    ("3√12", "3√2", r"6\sqrt{3}"),
    ("5²", "5³", "25"),
    (r"10^{-3}", r"10^{3}", "1e-3"),
    ("1e33", "1e32", r"10^{33}"),
    ("1/3e5", "5e/3", "1/300000"),
    ("1e5000", "2e5000", "1e5000"),
    ("2e - 3", "0.002", "2e-3+0"),
    ("e^2 - 3 - 2e", "e^2 - 0.002", "e^2-2e-3"),
    ("6e - 2", "0.6", "2(3e-1)"),
    ("10^{3}", "6e3", "10⁻³ \\cdot 10^6"),
    (r"2^{\frac13}", r"2^{\frac12}", "∛2".replace("∛", r"\sqrt[3]")),
]


@pytest.mark.parametrize(("right_answer", "wrong_answer", "reference"), TWINS)
def test_a_spelling_is_right_and_its_twin_is_wrong(right_answer, wrong_answer, reference):
    assert compare_without_algebra(right_answer, reference) is True
    assert compare(wrong_answer, reference, equal_expressions) is False


@pytest.mark.parametrize(("right_answer", "wrong_answer", "reference"), BY_ALGEBRA)
def test_algebra_reads_these_spellings_too(right_answer, wrong_answer, reference):
    assert compare(right_answer, reference, equal_expressions) is True
    assert compare(wrong_answer, reference, equal_expressions) is False


@pytest.mark.parametrize("answer", ["18e", r"3e \cdot 6", r"3 \times 6e", "3e6e"])
def test_e_notation_is_not_the_number_e(answer):
    assert compare(answer, "3e6", equal_expressions) is False


def test_brackets_nested_hundreds_of_times_are_compared():
    nested_text = "(" * 210 + "1" + ",1)" * 210
    assert compare_without_algebra(nested_text.replace("1", "2", 1), nested_text) is False
    assert compare_without_algebra(nested_text, nested_text) is True


@pytest.mark.parametrize(
    "reference",
    [
        r"\boxed{5}",
        "['5']",
        '["5"]',
        "#### 5",
        "<answer>5</answer>",
        r"\frac{1}{2",
        "",
        " . ",
        "5 apples",
        "The answer is 5.",
    ],
)
def test_what_no_other_spelling_can_equal_is_not_readable(reference):
    assert not is_readable(reference)


@pytest.mark.parametrize(
    "reference",
    [
        "5",
        r"5\text{ apples}",
        "5 square meters",
        "[5]",
        "Evelyn",
        "two lines",
        "A",
        "(B) The gas expands",
        "x^2+1",
        "[0,1)",
        r"\text{Yes, it is}",
        "1, 2",
        "12_5",
        r"x \in [0,1]",
        "a<b",
        "2 sqrt(3)",
        "4.5e33",
        "p \\to q",
    ],
)
def test_other_references_are_readable(reference):
    assert is_readable(reference)
