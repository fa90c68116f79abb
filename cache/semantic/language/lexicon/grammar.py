"""Closed word classes of English: contractions, function words, light verbs, politeness, negators."""

from cache.semantic.language.lexicon import words

CONTRACTIONS: dict[str, tuple[str, ...]] = {
    "can't": ("can", "not"),
    "cannot": ("can", "not"),
    "cant": ("can", "not"),
    "won't": ("will", "not"),
    "wont": ("will", "not"),
    "shan't": ("shall", "not"),
    "ain't": ("is", "not"),
    "aint": ("is", "not"),
    "i'm": ("i", "am"),
    "im": ("i", "am"),
    "ive": ("i", "have"),
    "let's": ("let", "us"),
    "lets": ("let", "us"),
    "gonna": ("going", "to"),
    "wanna": ("want", "to"),
    "gotta": ("got", "to"),
    "gimme": ("give", "me"),
    "lemme": ("let", "me"),
    "dunno": ("do", "not", "know"),
    "whats": ("what", "is"),
    "wheres": ("where", "is"),
    "hows": ("how", "is"),
    "whos": ("who", "is"),
    "whens": ("when", "is"),
    "thats": ("that", "is"),
    "theres": ("there", "is"),
    "u": ("you",),
    "ur": ("your",),
    "r": ("are",),
    "pls": ("please",),
    "plz": ("please",),
    "thx": ("thanks",),
    "y'all": ("you",),
    "o'clock": ("oclock",),
} | {
    form: (verb, "not")
    for verb in words("do does did is are was were has have had would could should must need might")
    for form in (f"{verb}n't", f"{verb}nt")
}

# What an apostrophe may be followed by, apart from the possessive: the rest of a contraction.
CONTRACTED: dict[str, str] = {"re": "are", "ve": "have", "ll": "will", "d": "would", "m": "am"}

NEGATORS = words(
    "not no never without none nothing nobody neither nor nowhere hardly barely rarely seldom except excluding "
    "excludes unable lack lacks lacking minus besides instead"
)

# Words that carry no subject of their own. Negators and prepositions of direction are read before they are dropped.
FUNCTION_WORDS = words(
    "a an the this that these those there here it its itself he him his she her hers they them their theirs we us "
    "our ours i me my mine myself you your yours yourself one ones someone somebody something anyone anybody "
    "anything everyone everybody everything who whom whose which what when where why how whether is am are was were "
    "be been being do does did done doing have has had having will would shall should can could may might must ought "
    "and or but if then so because as than while though although since unless until till of to in into on onto in at "
    "by for from with about over under through during between among against across along around within upon per via "
    "out off up down near behind beyond toward towards very too also just only even still yet already again ever "
    "more most much many some any all both each every either such same other another else rather quite well soon "
    "back away before after now today currently nowadays presently whenever wherever whatever whichever whoever "
    "however regarding concerning despite cuz til using alright oclock s t"
)

# Verbs and nouns that a paraphrase adds or drops freely: what is asked about stands beside them.
LIGHT_WORDS = words(
    "get got getting gotten gets go goes going went gone come comes coming came let lets letting want wants wanted "
    "need needs needed would like know knows knowing knew known tell tells telling told say says said show shows "
    "showing explain explains explaining see try trying tried tries happen happens happening happened seem seems "
    "possible able way ways thing things exactly actually really basically simply maybe perhaps probably wonder "
    "wondering wondered looking mean means meant inform instruct provide understand believe believes appear appears "
    "appearing guess sure supposed process procedure request requests requested requesting being have question "
    "questions help helps helping info information details idea please"
)

POLITENESS = words(
    "please kindly hey hi hello hiya yo thanks thank thankyou cheers sorry excuse pardon sir madam maam ok okay oh "
    "um uh hmm greetings ta damn hell heck fuck fucking bloody freaking idiot bro dude buddy mate lol btw asap "
    "urgently urgent appreciated appreciate"
)

# Left out wherever they stand.
EXPLETIVES = words("please kindly damn damned hell heck fuck fucking bloody freaking goddamn")
