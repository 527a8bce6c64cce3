"""Words of the two sets of facts in forms: ``develop`` and ``sealed`` share no name, no template and no kind of value. No model.

A *site* (a place, a vessel) has a code, an amount, a state and a keeper; a *person* has a badge. ``{label}`` is what a prompt calls a
field, the same in its chunks and in its question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

Draw = Callable[[random.Random], str]


@dataclass(frozen=True)
class Words:
    """How a set speaks of its facts in one language."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    given: tuple[str, ...]
    family: tuple[str, ...]
    states: tuple[str, str]
    """The asked one, and the other."""
    values: dict[str, tuple[Draw, ...]]
    labels: dict[str, tuple[str, ...]]
    told: dict[str, tuple[str, ...]]
    """Whole sentences."""
    asks: dict[str, tuple[str, ...]]
    within: str
    choose: str
    number: str
    aside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is put into the middle of another sentence."""
    said: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is said in a transcript."""
    name: str = "{0} {1}"
    person: str = "{0} {1}"
    listed: tuple[str, str] = ("the ", ", ")
    """What stands before each of several names, and between them."""
    question: str = "Question: "
    hay: tuple[str, ...] = ()
    """Sentences of languages that no corpus here has."""
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    small_talk: tuple[str, ...] = ()


def digits(low: int, high: int, text: str = "{}") -> Draw:
    """Draw a whole number."""
    return lambda draw: text.format(draw.randint(low, high))


def lettered(letters: str, low: int, high: int) -> Draw:
    """Draw a letter, two digits and a number, in one word."""
    return lambda draw: f"{draw.choice(letters)}{draw.randint(10, 99)}{draw.randint(low, high)}"


def grouped(joint: str) -> Draw:
    """Draw two groups of digits."""
    return lambda draw: f"{draw.randint(12, 98)}{joint}{draw.randint(1000, 9998)}"


def worded(*words: str) -> Draw:
    """Draw two words and a number, hyphenated."""
    return lambda draw: "-".join((*draw.sample(words, 2), str(draw.randint(11, 97))))


def tenths(low: int, high: int) -> Draw:
    """Draw a number with one decimal, which is not zero."""
    return lambda draw: f"{draw.randint(low, high)}.{draw.randint(1, 9)}"


def _both(*names: str) -> tuple[str, ...]:
    return tuple(" ".join(names).split())


DEVELOP = Words(
    first=_both(
        "Amber Birch Cobalt Dune Ember Falcon Granite Harbor Indigo Juniper Kestrel Lunar",
        "Marble Nectar Opal Pine Quartz Raven Saffron Timber Umber Velvet Willow Zephyr",
    ),
    second=_both(
        "archive bridge clinic depot foundry gallery hangar library",
        "museum nursery orchard station theatre quarry chapel granary mill tower forge cellar",
    ),
    given=_both(
        "Alva Bruno Clara Dario Edith Felix Greta Henrik Ines Jonas Katja Leon",
        "Mila Nils Olga Piet Rosa Stefan Tilda Ulrich Vera Wim Yara Zeno",
    ),
    family=_both(
        "Brandt Castel Dietz Enns Falk Grau Holm Isler Jansen Keller",
        "Lorenz Maurer Nolte Opitz Pfeiffer Quandt Reuter Sauer Thoma Ulmer",
    ),
    states=("closed", "open"),
    values={
        "code": (digits(10_000, 999_999), lettered("BCDFGH", 100, 999)),
        "amount": (digits(11, 989),),
        "badge": (lettered("KLMNP", 1000, 9999), digits(1_000_000, 9_999_999)),
    },
    labels={
        "site": ("site", "building"),
        "person": ("employee", "colleague"),
        "code": ("access code", "door code"),
        "amount": ("crates", "shelves"),
        "state": ("status", "state"),
        "keeper": ("keeper", "caretaker"),
        "badge": ("badge number", "staff number"),
    },
    told={
        "code": (
            "The {label} of the {name} is {value}.",
            "For the {name}, the {label} is {value}.",
            "Use {value} as the {label} of the {name}.",
            "At the {name}, the {label} was changed to {value}.",
        ),
        "amount": (
            "There are {value} {label} in the {name}.",
            "The {name} has {value} {label}.",
            "Inside the {name} stand {value} {label}.",
        ),
        "state": (
            "Today the {name} is {value}.",
            "The {name} is {value} today.",
            "At the moment the {name} is {value}.",
        ),
        "keeper": (
            "The {label} of the {name} is {value}.",
            "{value} is the {label} of the {name}.",
            "As its {label}, the {name} has {value}.",
        ),
        "badge": (
            "The {label} of {name} is {value}.",
            "{name} has the {label} {value}.",
            "{value} is the {label} of {name}.",
        ),
    },
    aside={
        "code": (
            "the {label} of the {name} being {value}",
            "with {value} as the {label} of the {name}",
            "since the {label} of the {name} is {value}",
        ),
        "amount": (
            "while the {name} has {value} {label}",
            "there being {value} {label} in the {name}",
        ),
        "state": ("while the {name} is {value} today", "the {name} being {value} today"),
        "keeper": (
            "the {label} of the {name} being {value}",
            "with {value} as the {label} of the {name}",
        ),
        "badge": (
            "the {label} of {name} being {value}",
            "{value} being the {label} of {name}",
        ),
    },
    said={
        "code": (
            "okay and the {label} of the {name} is {value} did you get that",
            "um so for the {name} the {label} is {value}",
            "yeah the {label} of the {name} that is {value} i think",
        ),
        "amount": (
            "and then the {name} has {value} {label} right",
            "so we counted {value} {label} in the {name} yes",
        ),
        "state": (
            "oh and the {name} is {value} today",
            "right so today the {name} is {value} you know",
        ),
        "keeper": (
            "well the {label} of the {name} is {value}",
            "so {value} is the {label} of the {name} now",
        ),
        "badge": (
            "and the {label} of {name} is {value}",
            "hm {name} has the {label} {value} i wrote it down",
        ),
    },
    asks={
        "one": ("What is the {code} of the {name}?", "Which {code} does the {name} have?"),
        "joined": ("Who is the {keeper} of the {name}, and what is the {badge} of this person?",),
        "comparison": (
            "Which has the most {amount}: {names}?",
            "Which of these has the most {amount}: {names}?",
        ),
        "count": ("How many of these are {state} today: {names}?",),
    },
    within="Answer with a few words and nothing else.",
    choose="Answer with one name and nothing else.",
    number="Answer with a number and nothing else.",
    small_talk=(
        "yeah exactly",
        "um let me see",
        "no no go on",
        "can you hear me",
        "so where were we",
        "i mean it is a long list",
        "okay next one",
        "wait a second",
        "that is what i have here",
    ),
)

SEALED = Words(
    first=_both(
        "Nimbus Corsair Aurora Beacon Drifter Everest Fathom Gannet Horizon Islander Jubilee Kraken",
        "Lodestar Meridian Narwhal Osprey Petrel Quasar Rambler Sirocco Trident Valiant Wanderer Xenia",
    ),
    second=_both(
        "ferry tanker trawler barge tug clipper dredger cutter",
        "schooner launch freighter yawl pontoon lugger hopper coaster skiff ketch sloop lighter",
    ),
    given=_both(
        "Maren Tobias Yusuf Sunniva Rashid Paloma Oskar Ngozi Lucien Kirsi Ismael Hye",
        "Gideon Freya Ebba Cai Anouk Bashir Dagny Emeka Hilda Jarek Lior Sanna",
    ),
    family=_both(
        "Okafor Lindqvist Haddad Moreau Petrov Tanaka Silva Ramires Quispe Eriksen",
        "Duarte Baptiste Achterberg Vance Falcone Gomez Halvorsen Ivanov Johansson Karimi",
    ),
    states=("moored", "sailing"),
    values={
        "code": (grouped("-"), worded("olive", "tiger", "maple", "comet", "lemon", "robin")),
        "amount": (tenths(10, 98),),
        "badge": (grouped("/"), worded("brass", "cloud", "ferns", "quill", "salty", "tulip")),
    },
    labels={
        "site": ("vessel", "craft"),
        "person": ("mariner", "officer"),
        "code": ("call sign", "clearance mark"),
        "amount": ("tonnes", "litres"),
        "state": ("situation", "berthing"),
        "keeper": ("pilot", "skipper"),
        "badge": ("licence", "passbook entry"),
    },
    told={
        "code": (
            "Port control lists {value} as {label} for the {name}.",
            "Whoever hails the {name} gives the {label} {value}.",
            "A {label}, {value}, belongs to the {name}.",
            "The harbour book shows the {name} under the {label} {value}.",
        ),
        "amount": (
            "On board of the {name} lie {value} {label}.",
            "The load of the {name} comes to {value} {label}.",
            "Some {value} {label} were put aboard the {name}.",
        ),
        "state": (
            "This evening finds the {name} {value}.",
            "According to the watch, the {name} remains {value}.",
            "The {name} was reported {value} tonight.",
        ),
        "keeper": (
            "On the {name} the {label} goes by the name of {value}.",
            "{value} serves aboard the {name} as {label}.",
            "For {label}, the owners of the {name} hired {value}.",
        ),
        "badge": (
            "{name} was issued the {label} {value}.",
            "The registrar wrote {value} for the {label} held by {name}.",
            "Papers of {name} show {value} under {label}.",
        ),
    },
    aside={
        "code": (
            "and the {name} answers to the {label} {value}",
            "as the {label} given to the {name} reads {value}",
            "although {value} remains the {label} assigned to the {name}",
        ),
        "amount": (
            "and the {name} carries {value} {label}",
            "as {value} {label} went into the {name}",
        ),
        "state": ("and the {name} lies {value} tonight", "as the {name} was seen {value} tonight"),
        "keeper": (
            "and {value} sails on the {name} as {label}",
            "as the {name} took on {value} for {label}",
        ),
        "badge": (
            "and {name} holds {value} as {label}",
            "as the {label} made out to {name} reads {value}",
        ),
    },
    said={
        "code": (
            "copy that {name} uses {label} {value} over",
            "alright listen {value} thats the {label} they gave the {name}",
            "uh the {name} checks in with {label} {value} say again",
        ),
        "amount": (
            "the {name} is carrying {value} {label} by my sheet",
            "got {value} {label} aboard the {name} confirmed",
        ),
        "state": (
            "looks like the {name} is still {value} tonight",
            "i see the {name} {value} from up here",
        ),
        "keeper": (
            "on the {name} you ask for {value} hes or shes the {label}",
            "they put {value} on the {name} as {label}",
        ),
        "badge": (
            "for {name} i read {label} {value}",
            "{value} thats what it says under {label} for {name}",
        ),
    },
    asks={
        "one": ("Give the {code} that belongs to the {name}.", "The {name} uses which {code}?"),
        "joined": ("Name the {keeper} on the {name}, then the {badge} which that person holds.",),
        "comparison": (
            "Among {names}, which carries the largest number of {amount}?",
            "Name the one that carries the largest number of {amount} among {names}.",
        ),
        "count": ("Among {names}, what is the number of those {state} tonight?",),
    },
    within="Reply briefly, with the answer alone.",
    choose="Reply with a single name alone.",
    number="Reply with a numeral alone.",
    listed=("the ", "; "),
    question="Asked: ",
    small_talk=(
        "roger",
        "stand by please",
        "say that once more",
        "channel sixteen is busy",
        "who is calling",
        "wind is picking up a little",
        "going down the sheet",
        "thats noted",
        "hold the line",
    ),
)

CHINESE = {
    "develop": Words(
        first=_both(
            "松林 云溪 白石 青山 长河 银杏 东湖 南岭 红枫 金桥 玉泉 蓝湾 梅园 竹海 星沙 望江"
        ),
        second=_both("仓库 书店 诊所 车站 剧院 学校 果园 工厂 食堂 花房 茶馆 邮局"),
        given=_both("建国 秀英 志强 丽华 文斌 雪梅 海涛 玉兰 明辉 春燕 国栋 晓峰 佳宁 子轩"),
        family=_both("王 李 张 刘 陈 杨 赵 黄 周 吴 徐 孙"),
        states=("关门", "开放"),
        values={
            "code": (digits(10_000, 999_999), lettered("BCDFGH", 100, 999)),
            "amount": (digits(11, 989),),
            "badge": (lettered("KLMNP", 1000, 9999),),
        },
        labels={
            "code": ("门禁密码", "开门密码"),
            "amount": ("箱子", "货架"),
            "state": ("状态",),
            "keeper": ("管理员", "负责人"),
            "badge": ("工号", "证件号"),
        },
        told={
            "code": (
                "{name}的{label}是{value}。",
                "{value}是{name}的{label}。",
                "上周换锁以后,{name}的{label}改成了{value},请大家记住,不要告诉别人。",
            ),
            "amount": (
                "{name}里有{value}个{label}。",
                "据统计,{name}一共有{value}个{label},比去年多一些。",
            ),
            "state": ("今天{name}{value}。", "因为天气的原因,{name}今天{value},明天再看情况。"),
            "keeper": (
                "{name}的{label}是{value}。",
                "自从搬家以后,{value}就是{name}的{label},大家都很满意。",
            ),
            "badge": (
                "{name}的{label}是{value}。",
                "登记表上写着,{name}的{label}是{value},已经核对过了。",
            ),
        },
        asks={
            "one": ("{name}的{code}是什么?",),
            "joined": ("{name}的{keeper}是谁?这个人的{badge}是什么?",),
            "comparison": ("{names},哪一个的{amount}最多?",),
            "count": ("{names},其中今天{state}的有几个?",),
        },
        within="请用几个字回答,不要说别的。",
        choose="请只回答一个名字,不要说别的。",
        number="请只回答一个数字,不要说别的。",
        name="{0}{1}",
        person="{1}{0}",
        listed=("", "、"),
        question="问题:",
        hay=(
            "{when},{who}在{where}附近{did}。",
            "{who}说,{where}的{thing}比以前{how}多了。",
            "那时候{where}还没有{thing},人们常常{did}。",
            "{when}的{where}很{how},{who}一边{did},一边谈论{thing}。",
            "很多人认为,{thing}对{where}来说非常重要。",
            "为了保护{thing},{who}提出了新的办法。",
            "{where}的{thing}在{when}吸引了许多游客。",
            "如果{when}下雨,{who}就不去{did}了。",
        ),
        slots={
            "when": ("清晨", "傍晚", "去年冬天", "节日前后", "三月初", "每个周末"),
            "who": ("村里的老人", "几位老师", "年轻的工人", "一群学生", "当地居民", "来访的客人"),
            "where": ("河边", "老城区", "山脚下", "市场", "海港", "广场"),
            "did": ("散步", "唱歌", "修理小船", "晒粮食", "下棋", "写生"),
            "thing": ("古树", "石桥", "手工艺", "灯会", "水渠", "戏曲"),
            "how": ("热闹", "安静", "干净", "漂亮", "方便"),
        },
    ),
    "sealed": Words(
        first=_both(
            "海燕 飞鱼 远航 晨曦 破浪 北极 顺风 彩虹 蛟龙 珊瑚 雷霆 启明 银河 神舟 沧浪 凌波"
        ),
        second=_both("号渡轮 号货船 号拖船 号游艇 号油轮 号帆船 号渔船 号驳船"),
        given=_both("若曦 浩然 思远 梓涵 景行 慕白 知夏 嘉树 怀瑾 清扬 逸飞 望舒 修齐 语桐"),
        family=_both("沈 韩 冯 蒋 曹 彭 苏 卢 魏 丁 薛 叶"),
        states=("停泊", "航行"),
        values={
            "code": (grouped("-"),),
            "amount": (tenths(10, 98),),
            "badge": (grouped("/"),),
        },
        labels={
            "code": ("呼号", "通行代号"),
            "amount": ("吨货物", "升燃料"),
            "state": ("情形",),
            "keeper": ("船长", "领航员"),
            "badge": ("执照编号", "海员证编号"),
        },
        told={
            "code": (
                "港口记录显示,{name}使用{label}{value}。",
                "联系{name}时须报出{label}{value}。",
                "经过两次核查,值班员把{value}登记为{name}所用的{label},并且通知了各个码头。",
            ),
            "amount": (
                "{name}装载了{value}{label}。",
                "离港之前,工人往{name}搬上{value}{label},整整忙了一夜。",
            ),
            "state": ("今晚{name}正在{value}。", "瞭望台报告说,{name}目前仍在{value},一切正常。"),
            "keeper": (
                "在{name}上担任{label}的人叫{value}。",
                "公司去年聘请{value}到{name}担任{label},合同为期三年。",
            ),
            "badge": (
                "{name}持有的{label}为{value}。",
                "海事局给{name}签发了{label}{value},有效期五年。",
            ),
        },
        asks={
            "one": ("{name}使用的{code}为何?",),
            "joined": ("何人在{name}上担任{keeper}?其{badge}为何?",),
            "comparison": ("在{names}当中,装载{amount}最多者为哪艘?",),
            "count": ("在{names}当中,今晚正在{state}者共几艘?",),
        },
        within="只写答案,尽量简短。",
        choose="只写一艘船的名称。",
        number="只写数目。",
        name="{0}{1}",
        person="{1}{0}",
        listed=("", "和"),
        question="所问:",
        hay=(
            "{who}{when}守在{where},留意{thing}的变化。",
            "据{who}回忆,{when}曾有{thing}出现在{where}。",
            "{where}一带{thing}{how},航道因此需要重新测量。",
            "有关{thing}的消息传到{where}之后,{who}议论纷纷。",
            "{who}把{thing}画在海图上,挂在{where}。",
            "尽管{thing}{how},{who}{when}照常出海。",
            "{when},{where}举行了关于{thing}的会议。",
            "关于{where}的传说,总与{thing}有关。",
        ),
        slots={
            "when": ("黎明时分", "入夜以后", "台风季", "退潮之际", "正午", "年底"),
            "who": ("灯塔看守人", "水手们", "气象员", "码头工人", "老船东", "海关职员"),
            "where": ("防波堤", "外海", "礁石滩", "船坞", "内港", "航标站"),
            "thing": ("洋流", "浓雾", "鱼群", "潮汐", "暗礁", "信号灯"),
            "how": ("异常猛烈", "变幻不定", "相当稀少", "十分密集", "难以预料"),
        },
    ),
}

ARABIC = {
    "develop": Words(
        first=_both(
            "النخيل الزيتون الياسمين الصنوبر الرمان النسيم الفجر القمر الربيع الوادي السنبلة الندى"
        ),
        second=_both("مخزن مكتبة عيادة محطة مسرح مدرسة بستان مصنع متحف معرض"),
        given=_both("سالم ليلى كريم هدى طارق نورا فارس سلمى ماجد رنا يوسف دينا"),
        family=_both("الحداد النجار الخياط العطار الصباغ البستاني الكاتب القاضي الراعي البحري"),
        states=("مغلق", "مفتوح"),
        values={
            "code": (digits(10_000, 999_999), lettered("BCDFGH", 100, 999)),
            "amount": (digits(11, 989),),
            "badge": (lettered("KLMNP", 1000, 9999),),
        },
        labels={
            "code": ("رمز الدخول", "رمز الباب"),
            "amount": ("صندوق", "رف"),
            "state": ("الحالة",),
            "keeper": ("المشرف", "المسؤول"),
            "badge": ("رقم البطاقة", "الرقم الوظيفي"),
        },
        told={
            "code": (
                "{label} في {name} هو {value}.",
                "في {name} {label} هو {value}.",
                "بعد تغيير الأقفال في الأسبوع الماضي أصبح {label} في {name} هو {value} ويرجى عدم نشره.",
            ),
            "amount": (
                "يوجد في {name} {value} {label}.",
                "حسب آخر إحصاء يوجد في {name} {value} {label} وهذا أكثر من العام الماضي.",
            ),
            "state": (
                "اليوم {name} {value}.",
                "بسبب الطقس فإن {name} اليوم {value} وسننظر غدا في الأمر.",
            ),
            "keeper": (
                "{label} في {name} هو {value}.",
                "منذ الانتقال صار {label} في {name} هو {value} والجميع راضون عن ذلك.",
            ),
            "badge": (
                "{label} عند {name} هو {value}.",
                "جاء في السجل أن {label} عند {name} هو {value} وقد تم التحقق منه.",
            ),
        },
        asks={
            "one": ("ما هو {code} في {name}؟",),
            "joined": ("من هو {keeper} في {name} وما هو {badge} عند هذا الشخص؟",),
            "comparison": ("أي من هذه فيه أكبر عدد ({amount}): {names}؟",),
            "count": ("كم من هذه {state} اليوم: {names}؟",),
        },
        within="أجب بكلمات قليلة فقط.",
        choose="أجب باسم واحد فقط.",
        number="أجب برقم فقط.",
        name="{1} {0}",
        listed=("", "، "),
        question="السؤال: ",
        hay=(
            "كان {who} {when} يجلسون قرب {where}.",
            "قال {who} إن {thing} في {where} أصبح أجمل من قبل.",
            "لم يكن في {where} قديما {thing} ولكن الناس أحبوا المكان.",
            "يرى كثيرون أن {thing} مهم جدا لأهل {where}.",
            "{when} يأتي {who} إلى {where} للحديث عن {thing}.",
            "من أجل حماية {thing} اقترح {who} طريقة جديدة.",
            "إذا نزل المطر {when} فإن {who} لا يخرجون إلى {where}.",
        ),
        slots={
            "when": ("في الصباح", "عند الغروب", "في الشتاء", "قبل العيد", "كل أسبوع"),
            "who": ("شيوخ القرية", "بعض المعلمين", "العمال", "الطلاب", "السكان"),
            "where": ("النهر", "المدينة القديمة", "سفح الجبل", "السوق", "الميناء"),
            "thing": ("الجسر الحجري", "فن الخزف", "السوق الشعبي", "مجرى الماء", "الشجر القديم"),
        },
    ),
    "sealed": Words(
        first=_both(
            "الشراع المرجان العاصفة النورس الأفق اللؤلؤ المحيط الصقر الشهاب البرق الموج الهدهد"
        ),
        second=_both("سفينة عبارة ناقلة قاطرة باخرة يخت زورق حوامة"),
        given=_both("عمران شيماء بلال أروى حمزة لبنى زياد ميساء قيس غادة وائل جمانة"),
        family=_both(
            "الشامي المغربي البصري النابلسي العدني الحلبي التونسي الكوفي الصيداوي الأندلسي"
        ),
        states=("راسية", "مبحرة"),
        values={
            "code": (grouped("-"),),
            "amount": (tenths(10, 98),),
            "badge": (grouped("/"),),
        },
        labels={
            "code": ("نداء اللاسلكي", "علامة العبور"),
            "amount": ("طن", "لتر"),
            "state": ("الوضع",),
            "keeper": ("الربان", "المرشد"),
            "badge": ("رخصة الملاحة", "دفتر البحار"),
        },
        told={
            "code": (
                "تستعمل {name} {label} {value}.",
                "سجل الميناء {label} {value} باسم {name}.",
                "من أراد مخاطبة {name} فعليه أن يذكر {label} {value} كما تنص تعليمات المرفأ الجديدة.",
            ),
            "amount": (
                "تحمل {name} {value} {label}.",
                "قبل المغادرة نقل العمال إلى {name} {value} {label} واستغرق ذلك الليل كله.",
            ),
            "state": (
                "هذا المساء {name} {value}.",
                "أفاد برج المراقبة أن {name} ما زالت {value} ولا جديد في ذلك.",
            ),
            "keeper": (
                "يعمل {value} على متن {name} بصفة {label}.",
                "تعاقدت الشركة مع {value} ليكون {label} على متن {name} لثلاث سنوات.",
            ),
            "badge": (
                "يحمل {name} {label} {value}.",
                "منحت السلطات {name} {label} {value} صالحة لخمس سنوات.",
            ),
        },
        asks={
            "one": ("أي {code} تستعمل {name}؟",),
            "joined": ("من يعمل على متن {name} بصفة {keeper} وأي {badge} يحمل؟",),
            "comparison": ("بين {names} أيها تحمل القدر الأكبر ({amount})؟",),
            "count": ("بين {names} ما عدد ما هو {state} هذا المساء؟",),
        },
        within="اكتب الجواب وحده باختصار.",
        choose="اكتب اسما واحدا وحده.",
        number="اكتب العدد وحده.",
        name="{1} {0}",
        listed=("", " و "),
        question="المطلوب: ",
        hay=(
            "راقب {who} {thing} {when} من {where}.",
            "ذكر {who} أنهم رأوا {thing} قرب {where}.",
            "تغير {thing} حول {where} فأعيد رسم الخرائط.",
            "وصلت أخبار {thing} إلى {where} فتناقلها {who}.",
            "علق {who} على جدار {where} رسما يصور {thing}.",
            "رغم {thing} خرج {who} {when} كعادتهم.",
            "عقد {when} اجتماع في {where} حول {thing}.",
        ),
        slots={
            "when": ("فجرا", "بعد منتصف الليل", "وقت الجزر", "ظهرا", "آخر السنة"),
            "who": ("حراس المنارة", "البحارة", "خبراء الأرصاد", "عمال الرصيف", "موظفو الجمارك"),
            "where": ("كاسر الأمواج", "عرض البحر", "الحوض الجاف", "محطة الإشارات", "الشعاب"),
            "thing": ("التيارات", "الضباب الكثيف", "أسراب السمك", "المد العالي", "أضواء الإرشاد"),
        },
    ),
}

ENGLISH = {"develop": DEVELOP, "sealed": SEALED}
