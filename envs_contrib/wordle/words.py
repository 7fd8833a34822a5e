"""Common English words of five letters, in random order: the first of them are a fair sample."""

from __future__ import annotations

_TEXT = """
clerk pearl penny alpha ample anger honor whose flask scary cheer trial agree imply album shall turbo
begin coast offer argue wedge short grant aroma clock nerve panel drill while mummy minor basic broth
glare canoe since women crime twins tense sight shady title early march price pasta touch peril lorry
windy weird chord vivid ocean donor major candy ultra doing koala excel visit chalk drama trade shout
grate judge chess event roost notch shake tired spend fatal noise known prowl chart civic broom surge
zebra brief clash feast agile stuff eager jumbo cater bored mouth scrub syrup sixty drift yeast porch
theme money clamp seize plate piece heavy hover skate later house berry reset drawn glory heard asset
never small flare elite rusty daily jumpy bonus motel roach lucky doubt beach under adopt cheek squad
cabin sneak ready vault stiff fully carry gavel abuse chaos least sound blend flesh spare prime north
tuner onset quota local total quirk cause batch group cover avoid comet child after brush hairy petty
label music decay photo thigh quick sport hasty crowd merit verse eaten model empty grind squid worry
chick ratio flake naive pluck stick blush boost rover flash noble refer coach steep merge vinyl place
given spicy amber blade gauge phase crust handy prone lyric balmy venue irony favor sword couch young
risky cough dozen white nanny peach scene badge pilot train exact towel saint kayak trust sheer rodeo
arose dirty prove blunt forge minus ought silky pause usage flora forum score spark thing safer polka
siren lemon pound dwell crumb tulip sober idiom risen fried there sandy cheat stove viral steam peace
party exist dried banjo essay movie write apple silly spill salad drown usher bleak enter mango limit
broke break intro polar stray ashes faith alike plump shade truth final dusty worth fruit grape chunk
hedge marsh fraud rainy sense vague chase khaki suite toxic awake loser guest reply sweep ounce sheep
video twice quote rocky beast today shrug grand stale greed timid audio match dealt fudge youth badly
guild roomy these spray speak drove hound groan weave sleep focus crane roast fuzzy patio flood heart
grain razor scare blink donut await hatch token topic poach until where yield paint tribe board hobby
array twist brook threw alter pride admit habit dream entry waist quilt forth valid screw champ basin
earth woman witch prism prior phone stain frown right thorn snowy ankle wrong curse meant fable three
still salsa fresh sixth tutor pixel angry scale brick cross foggy forty amend lodge thief armor night
rumor found liner stern crawl stair broad liver poser swamp width equal adult humid alive ledge crash
quake yearn super chill pinch vodka sauce unite knack bound slice first fiery smell taken smile fifty
grass adore slope grade ideal dress ripen utter nasty herbs barge store relay scarf woven comic equip
debut spoke toast ninth grasp alien onion exile linen stack bulky wrist psalm wagon urban frost sadly
spoil ridge prize flint meter rigid beads which gross pulse shock rugby raise boxer erase rinse rerun
scent table apply glide steal scold waste spine adapt laugh snail climb spade order might stood lunch
fence shore rhyme pitch could enjoy angel curly extra false water timer actor mouse quest carve chose
hotel uncle dryer crush tight reach front value attic voice shirt death straw satin niece thank moral
goose would click start creak coral enemy leafy ghost marry stout guess raven skirt curry input level
civil mayor queue moose agony angle dairy petal stool dizzy shine labor haunt drive vocal react elect
truce cling stork arrow depth plane swarm crown salon arena panda disco great medal salty again hence
tease diary sweet crack being delta birth ahead ditch press groom smart rapid trunk black fairy kneel
month plaid stump storm grace tumor grill bring diver worst apart dodge unity solve bloom crazy booth
bacon query dwarf panic stare fatty froze aisle weary shame media fever rifle poker blank third fling
clean grief fiber glove tower guard stake cramp swear juice tango blaze count icing realm dated bunch
flush shelf shift vapor sting elbow pouch ruler their grove rower power basil error wiser taste upper
gravy trick hazel cloak tasty shave llama world trait shark lower lease radar rally slate sharp legal
olive layer sorry rebel haste awful solid midst hello learn bless apron dough swell cycle audit metal
blown shove melon lousy vegan proof route swept troop brand oxide index built wreck cache tiger opera
choke happy alarm leave lobby canal loved viola royal greet lilac naked plush horse fleet snake award
sauna throw maple sleet faint naval cruel laser drums cocoa daisy scrap cobra solar teach buddy state
logic blond pizza renew aging alert brisk speed mason carol flank plaza stock noisy organ thumb plant
humor newly style widen bride cheap catch relic stall robin gloom human gland reign bench truck south
yours guide chief issue smoky round range scout funny whale plumb belly strap share skull plain stamp
above those paper joint clone fetch clear image tenor steak court began fluid flame watch shell woods
fight often purse clasp delay inbox drain seven along aloud yacht spell kiosk spice cliff crate trout
think swift shown crude sheet wheel spoon serve shiny other spite perch villa latch scoop maker lover
craft union flies charm flute limbo dense snack queen blame trend piano eagle tried rural alone manor
punch buyer whirl loose close align light truly puppy skill ivory digit river fifth rough sunny bunny
below envoy joker jeans hurry voter worse wrote brave inner study oasis flair dance swing cable frank
strip cloud teeth baron allow otter flour bliss lunar torch mixed about block aside nylon field boast
chain hardy clown baker claim aware globe pedal jewel blood giant gleam glass genre merry shape valor
split scope spike steer honey atlas rival print plank owner tenth lever space pupil wheat theft every
misty orbit force loyal green virus acute drank devil choir newer slack jolly agent creep plead creek
tough chest begun camel cream thick frill stage prose float trace grave radio draft maybe spear grown
shrub usual staff mercy shawl vital fault cedar weigh scorn shaky knife decor motor guilt brace track
crest ferry ranch sugar arise quack scalp moist stand ozone brass brink tempo magic cider brown story
treat quiet probe paste cargo beard smoke tooth elder proud fancy wound upset whole burst mount steel
prune trail nurse chair juicy flock knock novel relax stone sweat patch sonic trash graph brake breed
class robot frame cloth floor outer crisp drink sloth muddy diner blast harsh blind shaft bread haven
curve brain snore china jelly build slide spent check basis growl ulcer bowel rider cigar widow burnt
bleed setup easel pivot
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
