"""The languages of Whisper: their codes, as in its tokens, and their English names."""

_NAMES = """
af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian, bg bulgarian, bn bengali,
bo tibetan, br breton, bs bosnian, ca catalan, cs czech, cy welsh, da danish, de german, el greek, en english,
es spanish, et estonian, eu basque, fa persian, fi finnish, fo faroese, fr french, gl galician, gu gujarati, ha hausa,
haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian creole, hu hungarian, hy armenian, id indonesian,
is icelandic, it italian, ja japanese, jw javanese, ka georgian, kk kazakh, km khmer, kn kannada, ko korean, la latin,
lb luxembourgish, ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, mi maori, mk macedonian, ml malayalam,
mn mongolian, mr marathi, ms malay, mt maltese, my myanmar, ne nepali, nl dutch, nn nynorsk, no norwegian, oc occitan,
pa punjabi, pl polish, ps pashto, pt portuguese, ro romanian, ru russian, sa sanskrit, sd sindhi, si sinhala,
sk slovak, sl slovenian, sn shona, so somali, sq albanian, sr serbian, su sundanese, sv swedish, sw swahili, ta tamil,
te telugu, tg tajik, th thai, tk turkmen, tl tagalog, tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek,
vi vietnamese, yi yiddish, yo yoruba, yue cantonese, zh chinese
"""
LANGUAGES: dict[str, str] = {}  # code -> name
for _pair in _NAMES.split(","):
    _code, _, _name = _pair.strip().partition(" ")
    LANGUAGES[_code] = _name


def language_code(text: str) -> str:
    """The code of a language, given as a code or as an English name. Raises: ValueError if Whisper does not know it."""
    wanted = text.strip().lower()
    for code, name in LANGUAGES.items():
        if wanted in (code, name):
            return code
    raise ValueError(f"language {text[:50]!r} is not one of Whisper's: give a code such as en, or an English name")
