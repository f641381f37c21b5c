use super::*;
use crate::Gva;
use crate::condition::{Comparison, Condition};
use crate::fetch::{Base, Fetched, Memory, Pointer, Read};
use crate::insn::testing::bytes;
use crate::regs::{Gpr, RegisterSet};
use expect_test::{Expect, expect};
use iced_x86::{Decoder, DecoderOptions};

const AT: Gva = Gva(0xffff_ffff_8123_4560);
const DETOUR: Gva = Gva(0xffff_ffff_8004_0000);
const RING: Ring = Ring {
    head: Gva(0xffff_ffff_8010_0000),
    limit: Gva(0xffff_ffff_8010_0040),
    bell: Gva(0xffff_ffff_8010_0048),
    cells: Gva(0xffff_ffff_8010_1000),
    capacity: 1024,
    watermark: 512,
    doorbell_port: 0x5e,
};
const LOST: Gva = Gva(0xffff_ffff_8010_0080);
const VETOED: Gva = Gva(0xffff_ffff_8010_0088);
const INSTANCES: Instances = Instances {
    at: Gva(0xffff_ffff_8020_0000),
    count: 3,
    free: Gva(0xffff_ffff_8010_00c0),
};

fn span(hex: &str) -> Span {
    Span::find(&bytes(hex), AT, AT).unwrap()
}

fn text(code: &[u8], at: Gva) -> String {
    let mut lines = String::new();
    for instruction in Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).iter() {
        let line = format!("{:x} {instruction}\n", instruction.ip() & 0xffff_ffff);
        lines.push_str(&line);
    }
    lines
}

fn record(capture: &Capture) -> Part<'_> {
    Part::Record {
        source: 9,
        capture,
        lost: LOST,
    }
}

fn few() -> Capture {
    Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::Rcx]),
        stack: vec![1],
        task: None,
        cpu: Some(0x1_0000),
        fetching: None,
    }
}

#[test]
fn a_detour_of_the_kernel_is_addressed_with_32_bits() {
    let condition = Condition {
        register: Gpr::Rdx,
        comparison: Comparison::Greater,
        value: 0x1_0000_0000,
    };
    let capture = few();
    let member = Member {
        conditions: &[condition],
        vetoed: VETOED,
        part: record(&capture),
    };
    let span = span("55 488b3d10000000 c3");
    let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
    let detour = recorder.place(DETOUR).unwrap();
    assert_eq!(detour.code().len(), recorder.size());
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 lea eax,[rsp+28h]
        8004000a and eax,0FFFh
        8004000f cmp eax,0FF0h
        80040014 ja 0FFFFFFFF800400D4h
        8004001a mov rdx,[rsp+10h]
        8004001f mov rax,100000000h
        80040029 cmp rdx,rax
        8004002c jbe 0FFFFFFFF800400E2h
        80040032 rdtsc
        80040034 shl rdx,20h
        80040038 lea r11,[rax+rdx]
        8004003c mov rax,[0FFFFFFFF80100000h]
        80040044 lea rcx,[rax+1]
        80040048 cmp rcx,[0FFFFFFFF80100040h]
        80040050 ja 0FFFFFFFF800400EDh
        80040056 lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040060 jne short 0FFFFFFFF80040044h
        80040062 and eax,3FFh
        80040067 shl eax,6
        8004006a mov [rax-7FEFEFF8h],r11
        80040071 lea r11,[rax-7FEFF000h]
        80040078 mov eax,gs:[10000h]
        80040080 mov [r11+10h],eax
        80040084 mov eax,[rsp]
        80040087 mov [r11+14h],eax
        8004008b mov rax,[rsp+18h]
        80040090 mov [r11+18h],rax
        80040094 mov [r11+20h],rdi
        80040098 mov rax,[rsp+30h]
        8004009d mov [r11+28h],rax
        800400a1 mov [r11],ecx
        800400a4 mov dword ptr [r11+4],1000009h
        800400ac sub rcx,[0FFFFFFFF80100048h]
        800400b4 cmp rcx,1
        800400b8 jb short 0FFFFFFFF800400F8h
        800400ba pop rax
        800400bb xchg al,ah
        800400bd and al,8
        800400bf add al,78h
        800400c1 sahf
        800400c2 pop r11
        800400c4 pop rdx
        800400c5 pop rcx
        800400c6 pop rax
        800400c7 push rbp
        800400c8 mov rdi,[0FFFFFFFF81234578h]
        800400cf jmp 0FFFFFFFF81234568h
        800400d4 pop rax
        800400d5 xchg al,ah
        800400d7 and al,8
        800400d9 add al,78h
        800400db sahf
        800400dc pop r11
        800400de pop rdx
        800400df pop rcx
        800400e0 pop rax
        800400e1 int3
        800400e2 lock inc qword ptr [0FFFFFFFF80100088h]
        800400eb jmp short 0FFFFFFFF800400BAh
        800400ed lock inc qword ptr [0FFFFFFFF80100080h]
        800400f6 jmp short 0FFFFFFFF800400BAh
        800400f8 out 5Eh,al
        800400fa jmp short 0FFFFFFFF800400BAh
    "#]]
    .assert_eq(&text(detour.code(), DETOUR));
    let escape = detour.escape().unwrap();
    let offset = usize::try_from(escape.0 - DETOUR.0).unwrap();
    assert_eq!(detour.code()[offset], 0xcc);
    assert_eq!(detour.resume(AT), Some(detour.tail()));
    assert_eq!(
        detour.resume(AT.wrapping_add(1)),
        detour.tail().checked_add(1)
    );
    assert_eq!(detour.resume(AT.wrapping_add(2)), None);
}

#[test]
fn return_code_of_the_kernel_finds_its_instance_by_the_stub() {
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rax]),
        ..Capture::default()
    };
    let entry = EntryCapture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        stack: Vec::new(),
        current: None,
        cpu: None,
    };
    let exit = Exit {
        source: 9,
        capture: &capture,
        instances: &INSTANCES,
        entry: &entry,
        lost: LOST,
        first_stub: 5,
    };
    let code = ReturnCode::new(&RING, &exit).unwrap();
    let text = text(code.code(), DETOUR);
    let text: Vec<&str> = text
        .lines()
        .filter(|line| !line.ends_with(" int3"))
        .collect();
    expect![[r#"
        80040000 call 0FFFFFFFF80040030h
        80040010 call 0FFFFFFFF80040030h
        80040020 call 0FFFFFFFF80040030h
        80040030 push rax
        80040031 push rcx
        80040032 push rdx
        80040033 push rsi
        80040034 push rdi
        80040035 pushfq
        80040036 mov rsi,[rsp+30h]
        8004003b lea rdx,[0FFFFFFFF80040005h]
        80040042 sub rsi,rdx
        80040045 shl rsi,2
        80040049 lea rsi,[rsi-7FE00000h]
        80040050 mov rax,[rsi+10h]
        80040054 mov [rsp+30h],rax
        80040059 mov qword ptr [rsi+18h],0
        80040061 rdtsc
        80040063 shl rdx,20h
        80040067 lea rdi,[rax+rdx]
        8004006b mov rax,[0FFFFFFFF80100000h]
        80040073 lea rcx,[rax+2]
        80040077 cmp rcx,[0FFFFFFFF80100040h]
        8004007f ja 0FFFFFFFF80040158h
        80040085 lock cmpxchg [0FFFFFFFF80100000h],rcx
        8004008f jne short 0FFFFFFFF80040073h
        80040091 and eax,3FFh
        80040096 shl eax,6
        80040099 mov [rax-7FEFEFF8h],rdi
        800400a0 lea rdi,[rax-7FEFF000h]
        800400a7 mov eax,[rsp]
        800400aa mov [rdi+14h],eax
        800400ad mov rax,[rsp+28h]
        800400b2 mov [rdi+18h],rax
        800400b6 mov eax,esi
        800400b8 sub eax,80200000h
        800400bd shl rax,22h
        800400c1 mov rdx,8000050000000000h
        800400cb add rax,rdx
        800400ce mov rdx,[rsi+8]
        800400d2 shl rdx,18h
        800400d6 shr rdx,18h
        800400da add rax,rdx
        800400dd mov [rdi+20h],rax
        800400e1 mov rax,[rsi+10h]
        800400e5 mov [rdi+28h],rax
        800400e9 mov rax,[rsi+28h]
        800400ed mov [rdi+30h],rax
        800400f1 mov rax,[rsi+30h]
        800400f5 mov [rdi+38h],rax
        800400f9 mov rax,[rsi+38h]
        800400fd mov [rdi+48h],rax
        80040101 mov [rdi],ecx
        80040103 mov dword ptr [rdi+4],2000009h
        8004010a sub rcx,[0FFFFFFFF80100048h]
        80040112 cmp rcx,2
        80040116 jb short 0FFFFFFFF80040163h
        80040118 mov eax,esi
        8004011a sub eax,80200000h
        8004011f mov ecx,eax
        80040121 shr ecx,6
        80040124 mov rax,[0FFFFFFFF801000C0h]
        8004012c mov [rsi],eax
        8004012e mov rdx,rax
        80040131 shr rdx,20h
        80040135 inc edx
        80040137 shl rdx,20h
        8004013b or rdx,rcx
        8004013e lock cmpxchg [0FFFFFFFF801000C0h],rdx
        80040148 jne short 0FFFFFFFF8004012Ch
        8004014a pop rax
        8004014b xchg al,ah
        8004014d and al,8
        8004014f add al,78h
        80040151 sahf
        80040152 pop rdi
        80040153 pop rsi
        80040154 pop rdx
        80040155 pop rcx
        80040156 pop rax
        80040157 ret
        80040158 lock inc qword ptr [0FFFFFFFF80100080h]
        80040161 jmp short 0FFFFFFFF80040118h
        80040163 out 5Eh,al
        80040165 jmp short 0FFFFFFFF80040118h"#]]
    .assert_eq(&text.join("\n"));
}

#[test]
fn only_the_copies_depend_on_where_a_detour_is() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let recorder = Recorder::new(&span("488b3d10000000 c3"), &RING, &[member]).unwrap();
    let one = recorder.place(DETOUR).unwrap();
    let other = recorder.place(DETOUR.wrapping_add(0x123_4567)).unwrap();
    let tail = usize::try_from(one.tail().0 - DETOUR.0).unwrap();
    let differ: Vec<usize> = (0..recorder.size())
        .filter(|index| one.code()[*index] != other.code()[*index])
        .collect();
    assert!(
        differ.iter().all(|index| (tail..tail + 12).contains(index)),
        "{differ:?}"
    );
    assert!(!differ.is_empty());
}

fn refused(ring: &Ring, member: Member<'_>, expected: Expect) {
    let error = Recorder::new(&span("0f1f440000 c3"), ring, &[member]).unwrap_err();
    expected.assert_eq(&error.to_string());
}

#[test]
fn what_generated_code_cannot_do_is_refused() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let ring = |capacity, watermark| Ring {
        capacity,
        watermark,
        ..RING
    };
    for (capacity, watermark) in [(0, 0), (16, 8), (33, 8), (1 << 25, 8), (64, 0), (64, 64)] {
        let error = Recorder::new(
            &span("0f1f440000 c3"),
            &ring(capacity, watermark),
            &[member],
        );
        assert!(
            matches!(error, Err(BuildError::Ring { .. })),
            "{capacity} {watermark}"
        );
    }
    let far = Ring {
        limit: Gva(0x8000_0000),
        ..RING
    };
    refused(
        &far,
        member,
        expect![
            "the ring's limit at 0x80000000 is not within the upper or lower 2 GiB, where detours reach it"
        ],
    );
    let high = Capture {
        stack: vec![512],
        ..few()
    };
    let word = Member {
        part: record(&high),
        ..member
    };
    refused(
        &RING,
        word,
        expect!["word 512 above the stack pointer lies a page or more away from it"],
    );
    let many = Capture {
        stack: vec![0; 32],
        ..few()
    };
    let words = Member {
        part: record(&many),
        ..member
    };
    refused(
        &RING,
        words,
        expect!["32 words of the stack; at most 31 are possible"],
    );
}

#[test]
fn instances_begin_on_the_free_list() {
    let entry = EntryCapture {
        registers: RegisterSet::default(),
        stack: vec![0, 1],
        current: None,
        cpu: None,
    };
    let layout = InstanceLayout::new(&entry).unwrap();
    assert_eq!(layout.stride(), 256);
    let (bytes, free) = layout.initial(3);
    assert_eq!((bytes.len(), free), (768, 0));
    let next: Vec<u8> = [0, 256, 512].map(|at| bytes[at]).to_vec();
    assert_eq!(next, [1, 2, 0xff]);
    let instance = layout.read(&bytes[256..]).unwrap();
    assert_eq!((instance.slot, instance.generation), (Gva(0), 0));
    assert_eq!(layout.initial(0), (Vec::new(), 0xffff_ffff));
    assert!(layout.read(&bytes[600..]).is_err());
}

#[test]
fn impossible_numbers_of_instances_are_refused() {
    for (count, first_stub) in [(0, 0), (65537, 0), (1, 1 << 23), (2, (1 << 23) - 1)] {
        let instances = Instances { count, ..INSTANCES };
        let entry = EntryCapture {
            registers: RegisterSet::default(),
            stack: Vec::new(),
            current: None,
            cpu: None,
        };
        let exit = Exit {
            source: 0,
            capture: &Capture::default(),
            instances: &instances,
            entry: &entry,
            lost: LOST,
            first_stub,
        };
        let result = ReturnCode::new(&RING, &exit);
        assert!(
            matches!(result, Err(BuildError::Instances { .. })),
            "{count} {first_stub}"
        );
    }
}

#[test]
fn a_detour_reads_memory_by_calls_of_the_kernels_own_code() {
    let reader = |at: u64| [0, 1, 2, 3].map(|size| Gva(at + 0x40 * size));
    let pointer = |offset, memory| Pointer { offset, memory };
    let mut capture = Capture {
        registers: RegisterSet::from_iter([]),
        fetching: Some(Fetching {
            readers: Readers {
                kernel: reader(0xffff_ffff_81a0_0010),
                process: reader(0xffff_ffff_81a0_0000),
                kernel_half: Gva(0xffff_8000_0000_0000),
                process_end: Gva(0x7fff_ffff_f000),
                current: 0x1_fbc0,
                disabled: 0x9b8,
            },
            items: vec![Fetched {
                base: Base::Register(Gpr::Rdi),
                pointers: vec![pointer(8, Memory::Kernel), pointer(0, Memory::Kernel)],
                read: Read::Bytes(4),
            }],
        }),
        ..Capture::default()
    };
    let span = span("0f1f440000");
    let made = |capture: &Capture| {
        let member = Member {
            conditions: &[],
            vetoed: VETOED,
            part: record(capture),
        };
        let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
        let detour = recorder.place(DETOUR).unwrap();
        assert!(detour.escape().is_some());
        text(detour.code(), DETOUR)
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 bt dword ptr [rsp],12h
        8004000b jb 0FFFFFFFF80040126h
        80040011 mov rax,gs:[1FBC0h]
        8004001a cmp dword ptr [rax+9B8h],2
        80040021 ja 0FFFFFFFF80040126h
        80040027 rdtsc
        80040029 shl rdx,20h
        8004002d lea r11,[rax+rdx]
        80040031 mov rax,[0FFFFFFFF80100000h]
        80040039 lea rcx,[rax+1]
        8004003d cmp rcx,[0FFFFFFFF80100040h]
        80040045 ja 0FFFFFFFF80040134h
        8004004b lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040055 jne short 0FFFFFFFF80040039h
        80040057 and eax,3FFh
        8004005c shl eax,6
        8004005f mov [rax-7FEFEFF8h],r11
        80040066 lea r11,[rax-7FEFF000h]
        8004006d mov eax,[rsp]
        80040070 mov [r11+14h],eax
        80040074 mov qword ptr [r11+18h],0
        8004007c mov rax,gs:[1FBC0h]
        80040085 inc dword ptr [rax+9B8h]
        8004008b mov rax,rdi
        8004008e add rax,8
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae 0FFFFFFFF80040143h
        800400a7 cmp rax,0FFFFFFFFFFFFE000h
        800400ad ja 0FFFFFFFF80040143h
        800400b3 call 0FFFFFFFF81A000D0h
        800400b8 test eax,eax
        800400ba jne 0FFFFFFFF80040143h
        800400c0 mov rax,rdx
        800400c3 mov rdx,800000000000h
        800400cd add rdx,rax
        800400d0 jae short 0FFFFFFFF80040143h
        800400d2 cmp rax,0FFFFFFFFFFFFE000h
        800400d8 ja short 0FFFFFFFF80040143h
        800400da call 0FFFFFFFF81A00090h
        800400df test eax,eax
        800400e1 jne short 0FFFFFFFF80040143h
        800400e3 mov [r11+20h],edx
        800400e7 mov rax,gs:[1FBC0h]
        800400f0 dec dword ptr [rax+9B8h]
        800400f6 mov [r11],ecx
        800400f9 mov dword ptr [r11+4],1000009h
        80040101 sub rcx,[0FFFFFFFF80100048h]
        80040109 cmp rcx,1
        8004010d jb short 0FFFFFFFF8004013Fh
        8004010f pop rax
        80040110 xchg al,ah
        80040112 and al,8
        80040114 add al,78h
        80040116 sahf
        80040117 pop r11
        80040119 pop rdx
        8004011a pop rcx
        8004011b pop rax
        8004011c nop [rax+rax]
        80040121 jmp 0FFFFFFFF81234565h
        80040126 pop rax
        80040127 xchg al,ah
        80040129 and al,8
        8004012b add al,78h
        8004012d sahf
        8004012e pop r11
        80040130 pop rdx
        80040131 pop rcx
        80040132 pop rax
        80040133 int3
        80040134 lock inc qword ptr [0FFFFFFFF80100080h]
        8004013d jmp short 0FFFFFFFF8004010Fh
        8004013f out 5Eh,al
        80040141 jmp short 0FFFFFFFF8004010Fh
        80040143 or dword ptr [r11+18h],1
        80040148 jmp short 0FFFFFFFF800400E7h
    "#]]
    .assert_eq(&made(&capture));
    let fetching = capture.fetching.as_mut().unwrap();
    fetching.items[0] = Fetched {
        base: Base::Register(Gpr::Rsi),
        pointers: vec![pointer(0, Memory::Either)],
        read: Read::Text(100),
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 push rsi
        80040006 push rdi
        80040007 push r8
        80040009 pushfq
        8004000a bt dword ptr [rsp],12h
        8004000f jb 0FFFFFFFF800401B9h
        80040015 mov rax,gs:[1FBC0h]
        8004001e cmp dword ptr [rax+9B8h],2
        80040025 ja 0FFFFFFFF800401B9h
        8004002b rdtsc
        8004002d shl rdx,20h
        80040031 lea r11,[rax+rdx]
        80040035 mov rax,[0FFFFFFFF80100000h]
        8004003d lea rcx,[rax+3]
        80040041 cmp rcx,[0FFFFFFFF80100040h]
        80040049 ja 0FFFFFFFF800401CBh
        8004004f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040059 jne short 0FFFFFFFF8004003Dh
        8004005b and eax,3FFh
        80040060 shl eax,6
        80040063 mov [rax-7FEFEFF8h],r11
        8004006a lea r11,[rax-7FEFF000h]
        80040071 mov eax,[rsp]
        80040074 mov [r11+14h],eax
        80040078 mov qword ptr [r11+18h],0
        80040080 mov rax,gs:[1FBC0h]
        80040089 inc dword ptr [rax+9B8h]
        8004008f mov rax,[rsp+18h]
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae short 0FFFFFFFF80040108h
        800400a3 cmp rax,0FFFFFFFFFFFFE000h
        800400a9 ja short 0FFFFFFFF80040108h
        800400ab mov rsi,rax
        800400ae lea rdi,[r11+20h]
        800400b2 mov r8d,0Dh
        800400b8 mov rax,rsi
        800400bb call 0FFFFFFFF81A000D0h
        800400c0 test eax,eax
        800400c2 jne 0FFFFFFFF800401DAh
        800400c8 mov [rdi],rdx
        800400cb mov rax,0FEFEFEFEFEFEFEFFh
        800400d5 add rax,rdx
        800400d8 not rdx
        800400db and rdx,rax
        800400de mov rax,8080808080808080h
        800400e8 test rdx,rax
        800400eb jne short 0FFFFFFFF80040106h
        800400ed add rsi,8
        800400f1 add rdi,8
        800400f5 test edi,38h
        800400fb jne short 0FFFFFFFF80040101h
        800400fd add rdi,8
        80040101 dec r8d
        80040104 jne short 0FFFFFFFF800400B8h
        80040106 jmp short 0FFFFFFFF80040176h
        80040108 mov rdx,7FFFFFFFD000h
        80040112 cmp rax,rdx
        80040115 jae 0FFFFFFFF8004022Ch
        8004011b mov rsi,rax
        8004011e lea rdi,[r11+20h]
        80040122 mov r8d,0Dh
        80040128 mov rax,rsi
        8004012b call 0FFFFFFFF81A000C0h
        80040130 test eax,eax
        80040132 jne 0FFFFFFFF80040203h
        80040138 mov [rdi],rdx
        8004013b mov rax,0FEFEFEFEFEFEFEFFh
        80040145 add rax,rdx
        80040148 not rdx
        8004014b and rdx,rax
        8004014e mov rax,8080808080808080h
        80040158 test rdx,rax
        8004015b jne short 0FFFFFFFF80040176h
        8004015d add rsi,8
        80040161 add rdi,8
        80040165 test edi,38h
        8004016b jne short 0FFFFFFFF80040171h
        8004016d add rdi,8
        80040171 dec r8d
        80040174 jne short 0FFFFFFFF80040128h
        80040176 mov rax,gs:[1FBC0h]
        8004017f dec dword ptr [rax+9B8h]
        80040185 mov [r11],ecx
        80040188 mov dword ptr [r11+4],3000009h
        80040190 sub rcx,[0FFFFFFFF80100048h]
        80040198 cmp rcx,3
        8004019c jb short 0FFFFFFFF800401D6h
        8004019e pop rax
        8004019f xchg al,ah
        800401a1 and al,8
        800401a3 add al,78h
        800401a5 sahf
        800401a6 pop r8
        800401a8 pop rdi
        800401a9 pop rsi
        800401aa pop r11
        800401ac pop rdx
        800401ad pop rcx
        800401ae pop rax
        800401af nop [rax+rax]
        800401b4 jmp 0FFFFFFFF81234565h
        800401b9 pop rax
        800401ba xchg al,ah
        800401bc and al,8
        800401be add al,78h
        800401c0 sahf
        800401c1 pop r8
        800401c3 pop rdi
        800401c4 pop rsi
        800401c5 pop r11
        800401c7 pop rdx
        800401c8 pop rcx
        800401c9 pop rax
        800401ca int3
        800401cb lock inc qword ptr [0FFFFFFFF80100080h]
        800401d4 jmp short 0FFFFFFFF8004019Eh
        800401d6 out 5Eh,al
        800401d8 jmp short 0FFFFFFFF8004019Eh
        800401da mov rax,rsi
        800401dd call 0FFFFFFFF81A00010h
        800401e2 test eax,eax
        800401e4 jne short 0FFFFFFFF8004022Ch
        800401e6 mov [rdi],dl
        800401e8 test dl,dl
        800401ea je 0FFFFFFFF80040106h
        800401f0 inc rsi
        800401f3 inc rdi
        800401f6 test edi,7
        800401fc jne short 0FFFFFFFF800401DAh
        800401fe jmp 0FFFFFFFF800400F5h
        80040203 mov rax,rsi
        80040206 call 0FFFFFFFF81A00000h
        8004020b test eax,eax
        8004020d jne short 0FFFFFFFF8004022Ch
        8004020f mov [rdi],dl
        80040211 test dl,dl
        80040213 je 0FFFFFFFF80040176h
        80040219 inc rsi
        8004021c inc rdi
        8004021f test edi,7
        80040225 jne short 0FFFFFFFF80040203h
        80040227 jmp 0FFFFFFFF80040165h
        8004022c or dword ptr [r11+18h],1
        80040231 jmp 0FFFFFFFF80040176h
    "#]]
    .assert_eq(&made(&capture));
}
