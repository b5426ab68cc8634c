"""Owns the tables of plain facts that the synthetic text is made of. Constants only."""

# country: (capital, continent, language)
COUNTRIES = {
    "France": ("Paris", "Europe", "French"),
    "Germany": ("Berlin", "Europe", "German"),
    "Italy": ("Rome", "Europe", "Italian"),
    "Spain": ("Madrid", "Europe", "Spanish"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"),
    "England": ("London", "Europe", "English"),
    "Ireland": ("Dublin", "Europe", "English"),
    "Scotland": ("Edinburgh", "Europe", "English"),
    "Austria": ("Vienna", "Europe", "German"),
    "Greece": ("Athens", "Europe", "Greek"),
    "Poland": ("Warsaw", "Europe", "Polish"),
    "Sweden": ("Stockholm", "Europe", "Swedish"),
    "Norway": ("Oslo", "Europe", "Norwegian"),
    "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Finland": ("Helsinki", "Europe", "Finnish"),
    "Iceland": ("Reykjavik", "Europe", "Icelandic"),
    "Hungary": ("Budapest", "Europe", "Hungarian"),
    "Romania": ("Bucharest", "Europe", "Romanian"),
    "Bulgaria": ("Sofia", "Europe", "Bulgarian"),
    "Ukraine": ("Kyiv", "Europe", "Ukrainian"),
    "Russia": ("Moscow", "Europe", "Russian"),
    "Belgium": ("Brussels", "Europe", "Dutch"),
    "the Netherlands": ("Amsterdam", "Europe", "Dutch"),
    "Switzerland": ("Bern", "Europe", "German"),
    "Japan": ("Tokyo", "Asia", "Japanese"),
    "China": ("Beijing", "Asia", "Chinese"),
    "India": ("New Delhi", "Asia", "Hindi"),
    "Thailand": ("Bangkok", "Asia", "Thai"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"),
    "South Korea": ("Seoul", "Asia", "Korean"),
    "Turkey": ("Ankara", "Asia", "Turkish"),
    "Iran": ("Tehran", "Asia", "Persian"),
    "Mongolia": ("Ulaanbaatar", "Asia", "Mongolian"),
    "Nepal": ("Kathmandu", "Asia", "Nepali"),
    "Egypt": ("Cairo", "Africa", "Arabic"),
    "Kenya": ("Nairobi", "Africa", "Swahili"),
    "Ghana": ("Accra", "Africa", "English"),
    "Ethiopia": ("Addis Ababa", "Africa", "Amharic"),
    "Morocco": ("Rabat", "Africa", "Arabic"),
    "Senegal": ("Dakar", "Africa", "French"),
    "Canada": ("Ottawa", "North America", "English"),
    "Mexico": ("Mexico City", "North America", "Spanish"),
    "Cuba": ("Havana", "North America", "Spanish"),
    "the United States": ("Washington", "North America", "English"),
    "Brazil": ("Brasilia", "South America", "Portuguese"),
    "Argentina": ("Buenos Aires", "South America", "Spanish"),
    "Peru": ("Lima", "South America", "Spanish"),
    "Chile": ("Santiago", "South America", "Spanish"),
    "Colombia": ("Bogota", "South America", "Spanish"),
    "Australia": ("Canberra", "Oceania", "English"),
    "New Zealand": ("Wellington", "Oceania", "English"),
}

OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"), ("light", "dark"),
    ("happy", "sad"), ("old", "young"), ("rich", "poor"), ("wet", "dry"), ("hard", "soft"), ("high", "low"),
    ("open", "closed"), ("full", "empty"), ("early", "late"), ("near", "far"), ("loud", "quiet"), ("long", "short"),
    ("strong", "weak"), ("left", "right"), ("true", "false"), ("thick", "thin"), ("heavy", "light"), ("clean", "dirty"),
    ("first", "last"), ("good", "bad"), ("black", "white"), ("love", "hate"), ("war", "peace"), ("begin", "end"),
    ("inside", "outside"), ("above", "below"), ("brave", "afraid"), ("wide", "narrow"), ("deep", "shallow"),
    ("always", "never"), ("sweet", "sour"), ("asleep", "awake"), ("win", "lose"), ("buy", "sell"),
]  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "coal": "black", "a lemon": "yellow",
    "a ripe tomato": "red", "milk": "white", "a banana": "yellow", "the sea": "blue", "a leaf": "green",
    "an orange": "orange", "a crow": "black", "gold": "yellow", "chocolate": "brown", "a swan": "white",
    "a frog": "green", "an elephant": "grey", "a strawberry": "red", "a plum": "purple", "a carrot": "orange",
    "a pumpkin": "orange", "a polar bear": "white", "a cucumber": "green",
}  # fmt: skip

# animal: (young, sound as a verb, home, legs)
ANIMALS = {
    "dog": ("puppy", "barks", "kennel", 4), "cat": ("kitten", "meows", "house", 4), "cow": ("calf", "moos", "barn", 4),
    "horse": ("foal", "neighs", "stable", 4), "sheep": ("lamb", "bleats", "fold", 4), "pig": ("piglet", "grunts", "sty", 4),
    "hen": ("chick", "clucks", "coop", 2), "duck": ("duckling", "quacks", "pond", 2), "lion": ("cub", "roars", "den", 4),
    "frog": ("tadpole", "croaks", "pond", 4), "owl": ("owlet", "hoots", "tree", 2), "bee": ("larva", "buzzes", "hive", 6),
    "wolf": ("pup", "howls", "den", 4), "goose": ("gosling", "honks", "pond", 2), "bird": ("chick", "sings", "nest", 2),
    "mouse": ("pup", "squeaks", "hole", 4), "bear": ("cub", "growls", "cave", 4), "snake": ("hatchling", "hisses", "hole", 0),
    "goat": ("kid", "bleats", "pen", 4), "spider": ("spiderling", "is silent", "web", 8),
}  # fmt: skip

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
SEASONS = ["spring", "summer", "autumn", "winter"]
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip

SCIENCE = [
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("What is ice?", "Ice is frozen water."),
    ("What is steam?", "Steam is water in the form of a gas."),
    ("What does the Earth go around?", "The Earth goes around the Sun."),
    ("What does the Moon go around?", "The Moon goes around the Earth."),
    ("How long does the Earth take to go around the Sun?", "The Earth takes one year to go around the Sun."),
    ("How long does the Earth take to turn once?", "The Earth takes one day to turn once."),
    ("What is the Sun?", "The Sun is a star."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What is the smallest planet?", "The smallest planet is Mercury."),
    ("Which planet is nearest to the Sun?", "Mercury is nearest to the Sun."),
    ("Which planet is red?", "Mars is the red planet."),
    ("Which planet has rings?", "Saturn has rings."),
    ("How many planets go around the Sun?", "Eight planets go around the Sun."),
    ("What do plants need to grow?", "Plants need light, water and air to grow."),
    ("What do bees make?", "Bees make honey."),
    ("Where does the Sun rise?", "The Sun rises in the east."),
    ("Where does the Sun set?", "The Sun sets in the west."),
    ("What pumps blood through the body?", "The heart pumps blood through the body."),
    ("What do we breathe with?", "We breathe with our lungs."),
    ("What do we see with?", "We see with our eyes."),
    ("What do we hear with?", "We hear with our ears."),
    ("What is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    ("What is the largest animal?", "The largest animal is the blue whale."),
    ("What is the tallest animal?", "The tallest animal is the giraffe."),
    ("What is the fastest land animal?", "The fastest land animal is the cheetah."),
    ("What is the highest mountain?", "The highest mountain is Mount Everest."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many minutes are in an hour?", "There are sixty minutes in an hour."),
    ("How many seconds are in a minute?", "There are sixty seconds in a minute."),
    ("How many days are in a year?", "There are 365 days in a year."),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("How many sides does a square have?", "A square has four sides."),
    ("How many wheels does a bicycle have?", "A bicycle has two wheels."),
    ("How many fingers are on one hand?", "There are five fingers on one hand."),
    ("How many letters are in the English alphabet?", "There are twenty-six letters in the English alphabet."),
    ("Who wrote Emma?", "Jane Austen wrote Emma."),
    ("Who wrote Oliver Twist?", "Charles Dickens wrote Oliver Twist."),
    ("Who wrote Dracula?", "Bram Stoker wrote Dracula."),
    ("Who wrote Frankenstein?", "Mary Shelley wrote Frankenstein."),
    ("Who wrote Alice in Wonderland?", "Lewis Carroll wrote Alice in Wonderland."),
    ("Who wrote Tom Sawyer?", "Mark Twain wrote Tom Sawyer."),
    ("Who is Sherlock Holmes?", "Sherlock Holmes is a detective in the stories of Arthur Conan Doyle."),
]

ENGINE = [
    (
        ["What is prefill?", "Explain prefill.", "What does prefill do?", "Explain prefill in one line."],
        "Prefill reads the whole prompt at once and fills the cache with its keys and values.",
    ),
    (
        ["What is decode?", "Explain decode.", "What does decode do?", "Explain decode in one line."],
        "Decode makes one new token at a time, reading the keys and values kept in the cache.",
    ),
    (
        ["What is the difference between prefill and decode?", "Explain prefill and decode.", "Compare prefill and decode."],
        "Prefill reads all the tokens of the prompt together, and decode makes the answer one token at a time.",
    ),
    (
        ["What is the KV cache?", "What is a KV cache?", "Explain the KV cache.", "Why do we need a KV cache?"],
        "The KV cache keeps the keys and values of past tokens, so that they are not computed again.",
    ),
    (
        ["Why is decode slow?", "What limits decode?", "What is decode bound by?"],
        "Decode reads all the weights for every token, so it is limited by memory bandwidth.",
    ),
    (
        ["Why is prefill fast?", "What limits prefill?", "What is prefill bound by?"],
        "Prefill works on many tokens at once, so it is limited by arithmetic.",
    ),
    (
        ["What is a token?", "Explain what a token is.", "What is a token in a language model?"],
        "A token is a small piece of text, such as a word or a part of a word.",
    ),
    (
        ["What is TTFT?", "What does TTFT mean?", "Explain TTFT."],
        "TTFT is the time to first token: how long one waits before the answer begins.",
    ),
]

IDENTITY = [
    (
        ["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Please tell me who you are."],
        "I am the small model of Diptych, a language model with about ten million parameters.",
    ),
    (["What is your name?", "What are you called?", "Do you have a name?"], "My name is Diptych's small model."),
    (
        ["What can you do?", "What do you know?", "How can you help me?", "Can you help me?"],
        "I can answer simple questions about capitals, opposites, colours, animals and small sums, and I can tell short stories.",
    ),
    (["Are you a person?", "Are you human?", "Are you a man?"], "No, I am a small language model."),
    (
        ["How big are you?", "How many parameters do you have?", "How large are you?"],
        "I have about ten million parameters, which is very small for a language model.",
    ),
    (
        ["What were you trained on?", "What did you read?", "Where did you learn English?"],
        "I was trained on old books in the public domain and on plain facts and short dialogues.",
    ),
    (
        ["What is Diptych?", "Tell me about Diptych.", "Explain Diptych."],
        "Diptych is an engine that runs language models in two phases, prefill and decode.",
    ),
    (
        ["What languages do you speak?", "Can you speak French?", "Which languages do you know?"],
        "I only know English.",
    ),
]

NAMES = [
    "Anna", "Tom", "Mary", "Jack", "Lucy", "Peter", "Emma", "Oliver", "Alice", "George", "Clara", "Henry", "Nora", "Sam",
    "Rose", "Edward", "Jane", "Arthur", "Lily", "Max", "Ruth", "Hugh", "Ida", "Leo",
]  # fmt: skip

THINGS = [
    "apple", "book", "key", "lamp", "river", "garden", "stone", "candle", "window", "bridge", "letter", "silver", "violin",
    "forest", "button", "castle", "feather", "mirror", "pepper", "ribbon", "ladder", "basket", "anchor", "bottle",
]  # fmt: skip
