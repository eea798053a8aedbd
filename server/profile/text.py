"""A text to score: plain English on several subjects, about six hundred words, that no benchmark has."""

TEXT = """\
The harbour lay quiet in the early morning, and the first boats were already on their way out. A thin fog hung over
the water, so that the masts seemed to float on nothing at all. Old Marten sat on the wall above the landing stage,
as he did every day, and counted the boats as they passed the lighthouse. Twelve went out; he wanted twelve to come
back. When he was young he had sailed himself, first with his father, then alone, until a storm took his boat and
left him his life. Since then he mended nets, and told children stories about whales that nobody had seen for thirty
years.

Bread is made of flour, water, salt and yeast, and of time above all. Mix the flour with most of the water and let
it rest for half an hour before you add the salt; the dough will be easier to work. Knead it until it is smooth and
springs back when you press it with a finger. Cover it and leave it in a warm place until it has doubled in size.
Then shape the loaf, let it rise once more, and bake it in a very hot oven, with a dish of boiling water on the
floor of the oven to make steam. After twenty minutes, lower the heat. A loaf is done when it sounds hollow if you
knock on its base. Let it cool before you cut it, however good it smells.

A river does two kinds of work. In the mountains, where it is steep and fast, it cuts into the rock and carries away
what it has broken off. In the plain, where it is slow, it drops what it carried: gravel first, then sand, and in
the end the finest mud. So it builds the land that it flows through, and when it floods, it spreads a new layer of
soil over the fields. People have always lived with this bargain. They gained the best ground for their crops, and
every few years they had to leave their houses for the hills and wait until the water went down.

In a computer, memory is divided into pages of equal size. A program believes that it has all the memory to itself,
but the operating system decides which of its pages are really there. When the program touches one that is not, the
processor stops it, and the system reads the page from the disk and lets the program go on as if nothing had
happened. When memory is full, some page must leave first. The best choice would be the page that will not be needed
for the longest time, but nobody can know the future, so systems look at the past instead, and take a page that was
not used for a long while. It is a simple idea, and it works well, because programs tend to use again what they used
before.

The town council met on Thursday to talk about the old railway station. The building has stood empty since the line
was closed, and rain comes in through the roof. Some members want to pull it down and sell the land; others say that
it is the only building in the town that visitors remember. A carpenter who lives nearby offered to repair the roof
without pay if the town bought the timber. After two hours the council agreed to his offer, by seven votes to four,
and to meet again in spring. "It is not much," the mayor said afterwards, "but a house with a roof can wait for a
good idea, and one without a roof cannot."

What is the difference between a clever person and a wise one? A clever person, they say, finds the way out of a
trouble that a wise person would not have come into. It is a good answer, but not a fair one. Much of what we call
wisdom was paid for by somebody's trouble, and most people who give good advice at sixty did at twenty what they now
advise against.
"""
