"""Numbers and names as text."""

from feddg.text import command, counted, duration, listed, number, percent, printable, size


def test_numbers_and_names_read_well(subtests):
    for text, expected in [
        (percent(0.83449), "83.4"),
        (percent(None), "–"),
        (percent(float("nan")), "–"),
        (size(0), "0 bytes"),
        (size(999), "999 bytes"),
        (size(44_812_345), "44.8 MB"),
        (size(999_999_999), "1 GB"),
        (size(5.2e15), "5 200 TB"),
        (duration(0.423), "0.42 s"),
        (duration(59.7), "1 min 0 s"),
        (duration(192), "3 min 12 s"),
        (duration(19_200), "5 h 20 min"),
        (number(1_234_567), "1 234 567"),
        (number(6.54), "6.5"),
        (counted(1, "client"), "1 client"),
        (counted(2, "class", "classes"), "2 classes"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (printable("\x1b[2J\n\x9b\u202eab"), r"\x1b[2J\n\x9b\u202eab"),
        (command("resume", "a b/c"), "feddg resume 'a b/c'"),
    ]:
        with subtests.test(text=text, expected=expected):
            plain = text.replace("\N{NO-BREAK SPACE}", " ").replace(
                "\N{NARROW NO-BREAK SPACE}", " "
            )
            assert plain == expected
